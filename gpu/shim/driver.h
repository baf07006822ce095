/* The part of the CUDA driver API that the shim uses, in plain C types. CUdeviceptr and
   CUmemGenericAllocationHandle are uint64_t, CUdevice is int, other handles are void *.
   Source: cuda.h of CUDA 12.9 and 13.5. */
#ifndef PODFABRIC_GPU_DRIVER_H
#define PODFABRIC_GPU_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum cu_result {
    CU_SUCCESS = 0,
    CU_INVALID_VALUE = 1, /* in tests */
    CU_OUT_OF_MEMORY = 2,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_NOT_SUPPORTED = 801,
    CU_SYSTEM_NOT_READY = 802,
};

enum { CU_VERSION_NOT_SUFFICIENT = 2 };             /* CUdriverProcAddressQueryResult */
enum { CU_CAPTURE_NONE = 0, CU_CAPTURE_RELAXED = 2 }; /* status of a stream; mode of a thread */
enum { CU_NODE_IS_GRAPH = 4, CU_NODE_ALLOCATES = 10 }; /* CUgraphNodeType */
enum { CU_POOL_RESERVED = 5, CU_POOL_USED = 7 };    /* CUmemPool_attribute, …_CURRENT */
enum { CU_GRAPH_USED = 0, CU_GRAPH_RESERVED = 2 };   /* CUgraphMem_attribute, …_CURRENT */
enum { CU_ON_DEVICE = 1, CU_IN_LOCALITY_DOMAIN = 6 }; /* CUmemLocationType */
enum { CU_INSTANTIATE_UPLOADS = 2 };                  /* CUgraphInstantiate_flags */
enum { CU_ARRAY_SPARSE = 0x40, CU_ARRAY_DEFERRED = 0x80, CU_ARRAY_LAYERED = 1, CU_ARRAY_CUBEMAP = 4 };

#define CU_STREAM_OF_THREAD ((void *)2) /* CU_STREAM_PER_THREAD */

struct cu_location {
    int type;
    int id; /* the device; in a locality domain only the lowest byte */
};

struct cu_allocation { /* CUmemAllocationProp */
    int type;
    int handle_types;
    struct cu_location location;
    void *security;
    uint8_t flags[8];
};

struct cu_pool { /* CUmemPoolProps */
    int type;
    int handle_types;
    struct cu_location location;
    void *security;
    size_t most_bytes; /* maxSize, since CUDA 12.2; 0: the driver's default */
    uint8_t rest[56];
};

struct cu_alloc_node { /* CUDA_MEM_ALLOC_NODE_PARAMS */
    struct cu_pool pool;
    const void *access;
    size_t access_count;
    size_t bytes;
    uint64_t pointer;
};

struct cu_node { /* CUgraphNodeParams */
    int type;
    int reserved[3];
    union {
        struct cu_alloc_node alloc;
        void *child;
        uint64_t rest[29];
    };
    uint64_t reserved_end;
};

struct cu_instantiation { /* CUDA_GRAPH_INSTANTIATE_PARAMS */
    uint64_t flags;
    void *upload_stream;
    void *error_node;
    int result;
};

struct cu_array {
    size_t width, height;
    int format;
    unsigned channels;
};

struct cu_array_3d {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};

struct cu_launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    void *attributes;
    unsigned attribute_count;
};

_Static_assert(sizeof(struct cu_pool) == 88 && offsetof(struct cu_pool, most_bytes) == 24, "abi");
_Static_assert(offsetof(struct cu_alloc_node, bytes) == 104, "abi");
_Static_assert(offsetof(struct cu_node, alloc) == 16 && sizeof(struct cu_node) == 256, "abi");
_Static_assert(sizeof(struct cu_allocation) == 32, "abi");
_Static_assert(sizeof(struct cu_instantiation) == 32, "abi");
_Static_assert(offsetof(struct cu_launch_config, stream) == 32, "abi");

/* The driver's functions that the shim calls itself. NULL: the driver is too old for it. */
#define DRIVER_FUNCTIONS(DRIVER) \
    DRIVER(cuCtxGetCurrent, (void **context)) \
    DRIVER(cuCtxGetDevice, (int *device)) \
    DRIVER(cuDeviceGetUuid, (uint8_t uuid[16], int device)) \
    DRIVER(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active)) \
    DRIVER(cuDeviceGetMemPool, (void **pool, int device)) \
    DRIVER(cuMemFree_v2, (uint64_t pointer)) \
    DRIVER(cuMemFreeAsync, (uint64_t pointer, void *stream)) \
    DRIVER(cuMemPoolGetAttribute, (void *pool, int attribute, void *value)) \
    DRIVER(cuMemPoolTrimTo, (void *pool, size_t keep_bytes)) \
    DRIVER(cuDeviceGetGraphMemAttribute, (int device, int attribute, void *value)) \
    DRIVER(cuDeviceGraphMemTrim, (int device)) \
    DRIVER(cuStreamIsCapturing, (void *stream, int *status)) \
    DRIVER(cuStreamGetCaptureInfo_v2, (void *stream, int *status, uint64_t *id, void **graph, void *after, \
           size_t *count)) \
    DRIVER(cuStreamGetCaptureInfo_v3, (void *stream, int *status, uint64_t *id, void **graph, void *after, \
           void *edges, size_t *count)) \
    DRIVER(cuThreadExchangeStreamCaptureMode, (int *mode)) \
    DRIVER(cuEventCreate, (void **event, unsigned flags)) \
    DRIVER(cuEventDestroy_v2, (void *event)) \
    DRIVER(cuEventRecord, (void *event, void *stream)) \
    DRIVER(cuEventQuery, (void *event)) \
    DRIVER(cuEventElapsedTime, (float *milliseconds, void *start, void *end)) \
    DRIVER(cuFuncGetName, (const char **name, void *function)) \
    DRIVER(cuKernelGetName, (const char **name, void *kernel))

struct driver {
#define DRIVER(NAME, PARAMETERS) int(*NAME) PARAMETERS;
    DRIVER_FUNCTIONS(DRIVER)
#undef DRIVER
};

extern struct driver driver;

#endif
