/* Host memory for the GPU's use: it occupies no GPU memory. */
#include "objects.h"

#include <stdlib.h>

static CUresult allocate_host(void **pointer, size_t bytes)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    TRY(capture_forbids());
    if (pointer == NULL || bytes == 0)
        return INVALID_VALUE;
    return posix_memalign(pointer, 4096, bytes) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

PUBLIC CUresult cuMemAllocHost(void **pointer, uint32_t bytes)
{
    ENTER(cuMemAllocHost);
    return allocate_host(pointer, bytes);
}

PUBLIC CUresult cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    ENTER(cuMemAllocHost_v2);
    return allocate_host(pointer, bytes);
}

PUBLIC CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    ENTER(cuMemHostAlloc);
    (void)flags;
    return allocate_host(pointer, bytes);
}

PUBLIC CUresult cuMemFreeHost(void *pointer)
{
    ENTER(cuMemFreeHost);
    free(pointer);
    return SUCCESS;
}

/* The application's own memory, pinned. */
struct registration {
    struct object object;
    uint64_t start, bytes;
};

static struct registration *registration_in(uint64_t start, uint64_t bytes)
{
    for (struct object *one = objects_newest(); one != NULL; one = one->older) {
        struct registration *found = (struct registration *)one;
        if (one->type == REGISTRATION && found->start < start + bytes &&
            start < found->start + found->bytes)
            return found;
    }
    return NULL;
}

static CUresult register_host(void *pointer, size_t bytes)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    uint64_t start = (uint64_t)(uintptr_t)pointer;
    if (pointer == NULL || bytes == 0)
        return INVALID_VALUE;
    if (registration_in(start, bytes) != NULL)
        return HOST_MEMORY_ALREADY_REGISTERED;
    struct registration *made =
        object_new(sizeof *made, REGISTRATION, context->gpu, 0, 0, context);
    made->start = start;
    made->bytes = bytes;
    return SUCCESS;
}

PUBLIC CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    ENTER(cuMemHostRegister);
    (void)flags;
    return register_host(pointer, bytes);
}

PUBLIC CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    ENTER(cuMemHostRegister_v2);
    (void)flags;
    return register_host(pointer, bytes);
}

PUBLIC CUresult cuMemHostUnregister(void *pointer)
{
    ENTER(cuMemHostUnregister);
    LOCKED;
    struct registration *found = registration_in((uint64_t)(uintptr_t)pointer, 1);
    if (found == NULL || found->start != (uint64_t)(uintptr_t)pointer)
        return HOST_MEMORY_NOT_REGISTERED;
    object_destroy(&found->object);
    return SUCCESS;
}
