/* Memory of another process, through a handle from that process. The process that made the memory
 * is charged. */
#include "memory.h"

#include <string.h>

enum { LAZY_PEER_ACCESS = 1, OPAQUE_FILE = 1 };

struct ipc_handle {
    union {
        struct {
            uint64_t magic, bytes;
            uint32_t pid, gpu;
        };
        char reserved[64];
    };
};

static const uint64_t MAGIC = 0x656c646e61682d69;

PUBLIC CUresult cuIpcGetMemHandle(struct ipc_handle *handle, CUdeviceptr pointer)
{
    ENTER(cuIpcGetMemHandle);
    LOCKED;
    const struct allocation *allocation = object_at(pointer, ALLOCATION);
    if (handle == NULL || allocation == NULL || allocation->kind != HELD_LINEAR ||
        allocation->pool != NULL || allocation->of_graph)
        return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->magic = MAGIC;
    handle->bytes = allocation->asked;
    handle->pid = ledger_own->pid;
    handle->gpu = allocation->object.gpu;
    return SUCCESS;
}

/* A handle cannot be opened in the process that made it. */
static CUresult open(CUdeviceptr *pointer, const struct ipc_handle *handle, unsigned flags)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    if (pointer == NULL || flags != LAZY_PEER_ACCESS || handle->magic != MAGIC)
        return INVALID_VALUE;
    if (handle->pid == ledger_own->pid)
        return INVALID_CONTEXT;
    uint64_t length = (handle->bytes + 511) / 512 * 512;
    struct allocation *made = object_new(sizeof *made, ALLOCATION, handle->gpu,
                                         address_take(length, 512), length, context);
    made->kind = HELD_LINEAR;
    made->asked = handle->bytes;
    made->of_another = 1;
    *pointer = made->object.start;
    return SUCCESS;
}

PUBLIC CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, struct ipc_handle handle, unsigned flags)
{
    ENTER(cuIpcOpenMemHandle);
    return open(pointer, &handle, flags);
}

PUBLIC CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct ipc_handle handle, unsigned flags)
{
    ENTER(cuIpcOpenMemHandle_v2);
    return open(pointer, &handle, flags);
}

PUBLIC CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    ENTER(cuIpcCloseMemHandle);
    LOCKED;
    struct allocation *allocation = object_at(pointer, ALLOCATION);
    if (allocation == NULL || !allocation->of_another)
        return INVALID_VALUE;
    return allocation_release(allocation);
}

/* Memory of another API, such as Vulkan. The process that made it is charged. */
PUBLIC CUresult cuImportExternalMemory(CUhandle *memory, const struct external_memory *description)
{
    struct object *context;
    ENTER(cuImportExternalMemory);
    LOCKED;
    TRY(current_context(&context));
    if (memory == NULL || description == NULL || description->type != OPAQUE_FILE ||
        description->bytes == 0)
        return INVALID_VALUE;
    *memory = object_new(sizeof(struct object), EXTERNAL, context->gpu, 0, 0, context);
    return SUCCESS;
}

PUBLIC CUresult cuDestroyExternalMemory(CUhandle handle)
{
    ENTER(cuDestroyExternalMemory);
    LOCKED;
    struct object *external = object_of(handle, EXTERNAL);
    if (external == NULL)
        return INVALID_HANDLE;
    object_destroy(external);
    return SUCCESS;
}
