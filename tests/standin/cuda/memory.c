/* Linear memory: cuMemAlloc and related calls, host memory, and cuMemGetInfo. */
#include "memory.h"

#include "capture.h"
#include "pools.h"

#include <sys/mman.h>

static uint32_t saturated(uint64_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
}

PUBLIC CUresult cuMemGetInfo(uint32_t *free_bytes, uint32_t *total)
{
    uint64_t free_64, total_64;
    struct object *context;
    ENTER(cuMemGetInfo);
    LOCKED;
    TRY(current_context(&context));
    ledger_free_and_total(context->gpu, &free_64, &total_64);
    *free_bytes = saturated(free_64);
    *total = saturated(total_64);
    return SUCCESS;
}

PUBLIC CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    struct object *context;
    ENTER(cuMemGetInfo_v2);
    LOCKED;
    TRY(current_context(&context));
    ledger_free_and_total(context->gpu, free_bytes, total);
    return SUCCESS;
}

enum { BLOCK = 512, PAGE = 4096, ATTACH_GLOBAL = 1, ATTACH_HOST = 2 };

/* Allow or forbid the CPU's access to a range of device addresses. */
static void open_to_cpu(uint64_t start, uint64_t bytes, int open)
{
    int shared = open ? MAP_SHARED : MAP_PRIVATE; /* shared: not counted as this process' data */
    void *mapped = mmap((void *)(uintptr_t)start, bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE,
                        shared | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (mapped == MAP_FAILED)
        misuse("managed memory cannot be mapped", start);
}

/* Take memory of the current context's GPU. */
static CUresult allocate(uint64_t bytes, enum kind kind, int narrow, uint64_t *pointer)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    if (bytes == 0)
        return INVALID_VALUE;
    TRY(capture_forbids());
    if (bytes > 1ull << 60 || (narrow && bytes > UINT32_MAX - BLOCK))
        return OUT_OF_MEMORY;
    uint64_t block = kind == HELD_MANAGED ? PAGE : BLOCK;
    uint64_t length = (bytes + block - 1) / block * block;
    if (ledger_charge(context->gpu, kind, length) != 0)
        return OUT_OF_MEMORY;
    uint64_t start = narrow ? address_take_32((uint32_t)length) : address_take(length, block);
    if (start == 0) {
        ledger_credit(context->gpu, kind, length);
        return OUT_OF_MEMORY;
    }
    struct allocation *made =
        object_new(sizeof *made, ALLOCATION, context->gpu, start, length, context);
    made->kind = kind;
    made->asked = bytes;
    *pointer = start;
    return SUCCESS;
}

CUresult allocation_release(struct allocation *allocation)
{
    struct object *object = &allocation->object;
    if (allocation->pool != NULL) {
        pool_take_back(allocation);
        return SUCCESS;
    }
    if (allocation->of_graph)
        return graph_memory_free(allocation);
    if (allocation->kind == HELD_MANAGED)
        open_to_cpu(object->start, object->length, 0);
    if (!allocation->of_another)
        ledger_credit(object->gpu, allocation->kind, object->length);
    object_destroy(object);
    return SUCCESS;
}

static CUresult release(uint64_t pointer)
{
    struct object *context;
    LOCKED;
    if (pointer == 0)
        return SUCCESS;
    TRY(current_context(&context));
    TRY(capture_forbids());
    struct allocation *allocation = object_at(pointer, ALLOCATION);
    if (allocation == NULL || allocation->object.start != pointer || allocation->of_another)
        return INVALID_VALUE;
    return allocation_release(allocation);
}

PUBLIC CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, uint32_t bytes)
{
    uint64_t start;
    ENTER(cuMemAlloc);
    if (pointer == NULL)
        return INVALID_VALUE;
    TRY(allocate(bytes, HELD_LINEAR, 1, &start));
    *pointer = (CUdeviceptr_v1)start;
    return SUCCESS;
}

PUBLIC CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    ENTER(cuMemAlloc_v2);
    return pointer == NULL ? INVALID_VALUE : allocate(bytes, HELD_LINEAR, 0, pointer);
}

static CUresult pitched(uint64_t width, uint64_t height, unsigned element, uint64_t *pitch)
{
    if (element != 4 && element != 8 && element != 16)
        return INVALID_VALUE;
    if (width == 0 || height == 0 || width > 1ull << 40 || height > 1ull << 40)
        return INVALID_VALUE;
    const uint64_t unit = node_get()->pitch;
    *pitch = (width + unit - 1) / unit * unit;
    return *pitch > UINT64_MAX / height ? OUT_OF_MEMORY : SUCCESS;
}

PUBLIC CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, uint32_t *pitch, uint32_t width,
                                uint32_t height, unsigned element)
{
    uint64_t row, start;
    ENTER(cuMemAllocPitch);
    if (pointer == NULL || pitch == NULL)
        return INVALID_VALUE;
    TRY(pitched(width, height, element, &row));
    TRY(allocate(row * height, HELD_LINEAR, 1, &start));
    *pointer = (CUdeviceptr_v1)start;
    *pitch = (uint32_t)row;
    return SUCCESS;
}

PUBLIC CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                   unsigned element)
{
    uint64_t row;
    ENTER(cuMemAllocPitch_v2);
    if (pointer == NULL || pitch == NULL)
        return INVALID_VALUE;
    TRY(pitched(width, height, element, &row));
    if (node_get()->reenter)
        TRY(cuMemAlloc_v2(pointer, row * height));
    else
        TRY(allocate(row * height, HELD_LINEAR, 0, pointer));
    *pitch = row;
    return SUCCESS;
}

/* The CPU may access managed memory. The GPU's part of it counts as completely resident. */
PUBLIC CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
    uint64_t start;
    ENTER(cuMemAllocManaged);
    if (pointer == NULL || (flags != ATTACH_GLOBAL && flags != ATTACH_HOST))
        return INVALID_VALUE;
    TRY(allocate(bytes, HELD_MANAGED, 0, &start));
    open_to_cpu(start, (bytes + PAGE - 1) / PAGE * PAGE, 1);
    *pointer = start;
    return SUCCESS;
}

PUBLIC CUresult cuMemFree(CUdeviceptr_v1 pointer)
{
    ENTER(cuMemFree);
    return release(pointer);
}

PUBLIC CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    ENTER(cuMemFree_v2);
    return release(pointer);
}
