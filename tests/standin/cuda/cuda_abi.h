/* The part of the CUDA driver's ABI that the stand-in has, written from its documentation. Names
 * are the driver's; _v1 marks the ABI of CUDA before 3.2, with 32-bit device pointers and sizes. */
#ifndef STANDIN_CUDA_ABI_H
#define STANDIN_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint32_t CUdeviceptr_v1;
typedef uint64_t CUmemHandle;
typedef struct object *CUhandle; /* contexts, streams, events, arrays, graphs, ... */

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999
};

enum { LOCATION_DEVICE = 1, LOCATION_HOST = 2, LOCATION_HOST_NUMA = 3, LOCATION_HOST_NUMA_CURRENT = 4,
       LOCATION_DEVICE_LOCALITY_DOMAIN = 6 };

struct location {
    int type;
    int id; /* of a locality domain: the device is the lowest byte */
};

struct access {
    struct location location;
    int flags;
};

struct array_descriptor_v1 {
    uint32_t width, height;
    int format;
    unsigned channels;
};

struct array_descriptor {
    size_t width, height;
    int format;
    unsigned channels;
};

struct array3d_descriptor_v1 {
    uint32_t width, height, depth;
    int format;
    unsigned channels, flags;
};

struct array3d_descriptor {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};

enum { ARRAY_LAYERED = 0x01, ARRAY_CUBEMAP = 0x04, ARRAY_SPARSE = 0x40, ARRAY_DEFERRED_MAPPING = 0x80 };

struct allocation_properties {
    int type; /* 1: pinned */
    int handle_types;
    struct location location;
    void *metadata;
    unsigned char flags[8];
};

struct pool_properties {
    int type;
    int handle_types;
    struct location location;
    void *attributes;
    size_t max_size;
    unsigned char reserved[56];
};

struct multicast_properties {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};

struct external_memory {
    int type;
    union {
        int file;
        void *names[2];
    };
    unsigned long long bytes;
    unsigned flags, reserved[16];
};

struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    CUhandle stream;
    void *attributes;
    unsigned attribute_count;
};

struct launch_parameters {
    CUhandle function;
    unsigned grid[3], block[3], shared_bytes;
    CUhandle stream;
    void **parameters;
};

struct kernel_node {
    CUhandle function;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
    CUhandle kernel, context; /* since version 2 */
};

struct memory_node {
    struct pool_properties pool;
    const struct access *access;
    size_t access_count, bytes;
    CUdeviceptr pointer;
};

struct node_parameters {
    int type;
    int reserved[3];
    union {
        struct kernel_node kernel;
        struct memory_node alloc;
        CUdeviceptr free;
        CUhandle graph;
        char bytes[232];
    };
    long long reserved2;
};

/* The default streams' handles. */
#define STREAM_LEGACY ((CUhandle)(uintptr_t)1)
#define STREAM_PER_THREAD ((CUhandle)(uintptr_t)2)

_Static_assert(sizeof(struct array3d_descriptor) == 40, "CUDA_ARRAY3D_DESCRIPTOR_v2");
_Static_assert(sizeof(struct allocation_properties) == 32, "CUmemAllocationProp_v1");
_Static_assert(sizeof(struct pool_properties) == 88, "CUmemPoolProps_v1");
_Static_assert(sizeof(struct multicast_properties) == 32, "CUmulticastObjectProp_v1");
_Static_assert(sizeof(struct external_memory) == 104, "CUDA_EXTERNAL_MEMORY_HANDLE_DESC_v1");
_Static_assert(sizeof(struct launch_config) == 56, "CUlaunchConfig");
_Static_assert(sizeof(struct memory_node) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS_v2");
_Static_assert(sizeof(struct node_parameters) == 256, "CUgraphNodeParams");

#endif
