/* The table of hooks: each exported name that the shim replaces, its parameters, and the function
   that acts in its place. stubs.c makes an exported function and an entry of `hooks` from each row. */
#ifndef PODFABRIC_GPU_HOOKS_H
#define PODFABRIC_GPU_HOOKS_H

#include "driver.h"
#include "group.h"

/* The parameters of a group of functions, and the same names as arguments. */
#define PARAMS_flags unsigned flags
#define ARGS_flags flags
#define PARAMS_former uint64_t first, uint64_t second, uint64_t third, uint64_t fourth, uint64_t fifth
#define ARGS_former first, second, third, fourth, fifth
#define PARAMS_alloc uint64_t *pointer, size_t bytes
#define ARGS_alloc pointer, bytes
#define PARAMS_pitch uint64_t *pointer, size_t *pitch, size_t width, size_t height, unsigned element
#define ARGS_pitch pointer, pitch, width, height, element
#define PARAMS_managed uint64_t *pointer, size_t bytes, unsigned flags
#define ARGS_managed pointer, bytes, flags
#define PARAMS_pointer uint64_t pointer
#define ARGS_pointer pointer
#define PARAMS_alloc_async uint64_t *pointer, size_t bytes, void *stream
#define ARGS_alloc_async pointer, bytes, stream
#define PARAMS_alloc_pool uint64_t *pointer, size_t bytes, void *pool, void *stream
#define ARGS_alloc_pool pointer, bytes, pool, stream
#define PARAMS_free_async uint64_t pointer, void *stream
#define ARGS_free_async pointer, stream
#define PARAMS_pool_create void **pool, const struct cu_pool *properties
#define ARGS_pool_create pool, properties
#define PARAMS_pool_trim void *pool, size_t keep_bytes
#define ARGS_pool_trim pool, keep_bytes
#define PARAMS_pool_import void **pool, void *shared, int type, unsigned long long flags
#define ARGS_pool_import pool, shared, type, flags
#define PARAMS_pool_device void **pool, int device
#define ARGS_pool_device pool, device
#define PARAMS_pool_location void **pool, struct cu_location *location, int type
#define ARGS_pool_location pool, location, type
#define PARAMS_handle void *handle
#define ARGS_handle handle
#define PARAMS_create \
    uint64_t *handle, size_t bytes, const struct cu_allocation *properties, unsigned long long flags
#define ARGS_create handle, bytes, properties, flags
#define PARAMS_release uint64_t handle
#define ARGS_release handle
#define PARAMS_map \
    uint64_t pointer, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags
#define ARGS_map pointer, bytes, offset, handle, flags
#define PARAMS_unmap uint64_t pointer, size_t bytes
#define ARGS_unmap pointer, bytes
#define PARAMS_retain uint64_t *handle, void *address
#define ARGS_retain handle, address
#define PARAMS_import uint64_t *handle, void *shared, int type
#define ARGS_import handle, shared, type
#define PARAMS_array void **array, const struct cu_array *description
#define ARGS_array array, description
#define PARAMS_array_3d void **array, const struct cu_array_3d *description
#define ARGS_array_3d array, description
#define PARAMS_mipmap void **array, const struct cu_array_3d *description, unsigned levels
#define ARGS_mipmap array, description, levels
#define PARAMS_node_alloc \
    void **node, void *graph, void *const *after, size_t count, struct cu_alloc_node *parameters
#define ARGS_node_alloc node, graph, after, count, parameters
#define PARAMS_node void **node, void *graph, void *const *after, size_t count, struct cu_node *parameters
#define ARGS_node node, graph, after, count, parameters
#define PARAMS_node_v2                                                                        \
    void **node, void *graph, void *const *after, const void *edges, size_t count,            \
        struct cu_node *parameters
#define ARGS_node_v2 node, graph, after, edges, count, parameters
#define PARAMS_child void **node, void *graph, void *const *after, size_t count, void *child
#define ARGS_child node, graph, after, count, child
#define PARAMS_instantiate void **exec, void *graph, void **node, char *log, size_t log_bytes
#define ARGS_instantiate exec, graph, node, log, log_bytes
#define PARAMS_instantiate_flags void **exec, void *graph, uint64_t flags
#define ARGS_instantiate_flags exec, graph, flags
#define PARAMS_instantiate_with void **exec, void *graph, struct cu_instantiation *parameters
#define ARGS_instantiate_with exec, graph, parameters
#define PARAMS_graph void *graph, void *stream
#define ARGS_graph graph, stream
#define PARAMS_device int device
#define ARGS_device device
#define PARAMS_context void **context, unsigned flags, int device
#define ARGS_context context, flags, device
#define PARAMS_context_v3 void **context, void *affinity, int count, unsigned flags, int device
#define ARGS_context_v3 context, affinity, count, flags, device
#define PARAMS_context_v4 void **context, void *parameters, unsigned flags, int device
#define ARGS_context_v4 context, parameters, flags, device
#define PARAMS_primary void **context, int device
#define ARGS_primary context, device
#define PARAMS_green void **context, void *resources, int device, unsigned flags
#define ARGS_green context, resources, device, flags
#define PARAMS_memory size_t *free, size_t *total
#define ARGS_memory free, total
#define PARAMS_total size_t *bytes, int device
#define ARGS_total bytes, device
#define PARAMS_kernel PARAMS_cooperative, void **extra
#define ARGS_kernel ARGS_cooperative, extra
#define PARAMS_kernel_ex \
    const struct cu_launch_config *config, void *function, void **parameters, void **extra
#define ARGS_kernel_ex config, function, parameters, extra
#define PARAMS_cooperative                                                                    \
    void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,      \
        unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters
#define ARGS_cooperative \
    function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters
#define PARAMS_address const char *symbol, void **function, int version, uint64_t flags
#define ARGS_address symbol, function, version, flags
#define PARAMS_address_v2 PARAMS_address, int *status
#define ARGS_address_v2 ARGS_address, status

/* HOOK(exported name, parameters, what acts in its place) */
#define HOOKS(HOOK)                                          \
    HOOK(cuInit, flags, on_init)                             \
    HOOK(cuGetProcAddress, address, on_address)              \
    HOOK(cuGetProcAddress_v2, address_v2, on_address_v2)     \
    /* memory.c */                                           \
    HOOK(cuMemAlloc, former, on_former)                  \
    HOOK(cuMemAlloc_v2, alloc, on_alloc)                     \
    HOOK(cuMemAllocPitch, former, on_former)             \
    HOOK(cuMemAllocPitch_v2, pitch, on_pitch)                \
    HOOK(cuMemAllocManaged, managed, on_managed)             \
    HOOK(cuMemFree, former, on_former)                  \
    HOOK(cuMemFree_v2, pointer, on_free)                     \
    HOOK(cuMemFreeAsync, free_async, on_free_async)          \
    HOOK(cuMemFreeAsync_ptsz, free_async, on_free_async)     \
    HOOK(cuMemGetInfo, former, on_former)              \
    HOOK(cuMemGetInfo_v2, memory, on_memory)                 \
    HOOK(cuDeviceTotalMem, former, on_former)            \
    HOOK(cuDeviceTotalMem_v2, total, on_total)               \
    /* pools.c */                                            \
    HOOK(cuMemAllocAsync, alloc_async, on_alloc_async)       \
    HOOK(cuMemAllocAsync_ptsz, alloc_async, on_alloc_async)  \
    HOOK(cuMemAllocFromPoolAsync, alloc_pool, on_alloc_pool) \
    HOOK(cuMemAllocFromPoolAsync_ptsz, alloc_pool, on_alloc_pool) \
    HOOK(cuMemPoolCreate, pool_create, on_pool_create)       \
    HOOK(cuMemPoolDestroy, handle, on_pool_destroy)          \
    HOOK(cuMemPoolTrimTo, pool_trim, on_pool_trim)           \
    HOOK(cuMemPoolImportFromShareableHandle, pool_import, on_pool_import) \
    HOOK(cuDeviceGetDefaultMemPool, pool_device, on_pool_of_device) \
    HOOK(cuDeviceGetMemPool, pool_device, on_pool_of_device) \
    HOOK(cuMemGetDefaultMemPool, pool_location, on_pool_of_location) \
    HOOK(cuMemGetMemPool, pool_location, on_pool_of_location) \
    /* handles.c */                                          \
    HOOK(cuMemCreate, create, on_create)                     \
    HOOK(cuMemRelease, release, on_release)                  \
    HOOK(cuMemRetainAllocationHandle, retain, on_retain)     \
    HOOK(cuMemImportFromShareableHandle, import, on_import)  \
    HOOK(cuMemMap, map, on_map)                              \
    HOOK(cuMemUnmap, unmap, on_unmap)                        \
    /* arrays.c */                                           \
    HOOK(cuArrayCreate, former, on_former)               \
    HOOK(cuArrayCreate_v2, array, on_array)                  \
    HOOK(cuArray3DCreate, former, on_former)       \
    HOOK(cuArray3DCreate_v2, array_3d, on_array_3d)          \
    HOOK(cuMipmappedArrayCreate, mipmap, on_mipmap)          \
    HOOK(cuArrayDestroy, handle, on_array_destroy)           \
    HOOK(cuMipmappedArrayDestroy, handle, on_array_destroy)  \
    /* graphs.c */                                           \
    HOOK(cuGraphAddMemAllocNode, node_alloc, on_node_alloc)  \
    HOOK(cuGraphAddNode, node, on_node)                      \
    HOOK(cuGraphAddNode_v2, node_v2, on_node_v2)             \
    HOOK(cuGraphAddNode_v3, node_v2, on_node_v2)             \
    HOOK(cuGraphAddChildGraphNode, child, on_child)          \
    HOOK(cuGraphInstantiate, instantiate, on_instantiate)    \
    HOOK(cuGraphInstantiate_v2, instantiate, on_instantiate) \
    HOOK(cuGraphInstantiateWithFlags, instantiate_flags, on_instantiate_flags) \
    HOOK(cuGraphInstantiateWithParams, instantiate_with, on_instantiate_with) \
    HOOK(cuGraphInstantiateWithParams_ptsz, instantiate_with, on_instantiate_with) \
    HOOK(cuGraphDestroy, handle, on_graph_destroy)           \
    HOOK(cuGraphExecDestroy, handle, on_exec_destroy)        \
    HOOK(cuGraphUpload, graph, on_graph_upload)              \
    HOOK(cuGraphUpload_ptsz, graph, on_graph_upload)         \
    HOOK(cuGraphLaunch, graph, on_graph_launch)              \
    HOOK(cuGraphLaunch_ptsz, graph, on_graph_launch)         \
    HOOK(cuDeviceGraphMemTrim, device, on_graph_trim)        \
    /* contexts.c */                                         \
    HOOK(cuCtxCreate, context, on_context)                   \
    HOOK(cuCtxCreate_v2, context, on_context)                \
    HOOK(cuCtxCreate_v3, context_v3, on_context_v3)          \
    HOOK(cuCtxCreate_v4, context_v4, on_context_v4)          \
    HOOK(cuCtxDestroy, handle, on_context_destroy)           \
    HOOK(cuCtxDestroy_v2, handle, on_context_destroy)        \
    HOOK(cuDevicePrimaryCtxRetain, primary, on_primary_retain) \
    HOOK(cuDevicePrimaryCtxRelease, device, on_primary_release) \
    HOOK(cuDevicePrimaryCtxRelease_v2, device, on_primary_release) \
    HOOK(cuDevicePrimaryCtxReset, device, on_primary_reset)  \
    HOOK(cuDevicePrimaryCtxReset_v2, device, on_primary_reset) \
    HOOK(cuGreenCtxCreate, green, on_green)                  \
    HOOK(cuGreenCtxDestroy, handle, on_green_destroy)        \
    /* launches.c */                                         \
    HOOK(cuLaunchKernel, kernel, on_kernel)                  \
    HOOK(cuLaunchKernel_ptsz, kernel, on_kernel)             \
    HOOK(cuLaunchKernelEx, kernel_ex, on_kernel_ex)          \
    HOOK(cuLaunchKernelEx_ptsz, kernel_ex, on_kernel_ex)     \
    HOOK(cuLaunchCooperativeKernel, cooperative, on_cooperative) \
    HOOK(cuLaunchCooperativeKernel_ptsz, cooperative, on_cooperative) \
    HOOK(cuLaunchCooperativeKernelMultiDevice, former, on_former) \
    HOOK(cuLaunch, former, on_former)                        \
    HOOK(cuLaunchGrid, former, on_former)                        \
    HOOK(cuLaunchGridAsync, former, on_former)

struct hook {
    const char *name;
    void *stub; /* the shim's export */
    void *real; /* the driver's; NULL if the driver is too old */
    bool per_thread; /* named …_ptsz: stream 0 is the thread's own */
};

enum hook_index {
#define HOOK(NAME, ABI, ACT) HOOK_##NAME,
    HOOKS(HOOK)
#undef HOOK
        HOOK_COUNT
};

extern struct hook hooks[HOOK_COUNT];

#define HOOK(NAME, ABI, ACT) int ACT(const struct hook *hook, PARAMS_##ABI);
HOOKS(HOOK)
#undef HOOK

#define REAL(HOOK, ABI) ((int (*)(PARAMS_##ABI))(HOOK)->real)

/* A hook that calls the driver and records the result. */
#define NOTING(ACT, ABI, NOTE)                     \
    int ACT(const struct hook *hook, PARAMS_##ABI) \
    {                                              \
        int result = REAL(hook, ABI)(ARGS_##ABI);  \
        if (result == CU_SUCCESS && group_join())  \
            NOTE;                                  \
        return result;                             \
    }

/* The stream of a call, as functions without _ptsz understand it. */
static inline void *stream_of(const struct hook *hook, void *stream)
{
    return hook->per_thread && !stream ? CU_STREAM_OF_THREAD : stream;
}

#endif
