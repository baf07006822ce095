/* The stand-in for libnvidia-ml: it reads the node's ledger.
 * Results and structures are those of nvidia-ml-py. */
#ifndef STANDIN_NVML_H
#define STANDIN_NVML_H

#include "queue.h"

#define PUBLIC __attribute__((visibility("default")))

typedef int nvmlReturn;
typedef const struct node_gpu *nvmlDevice; /* a handle is the GPU's description */

enum { NVML_SUCCESS = 0, NVML_UNINITIALIZED = 1, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3,
       NVML_NO_PERMISSION = 4, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7,
       NVML_DRIVER_NOT_LOADED = 9, NVML_INSUFFICIENT_RESOURCES = 23, NVML_VERSION_MISMATCH = 25,
       NVML_UNKNOWN = 999 };

/* Begin an export: fail it if the node's file says so, and refuse it before nvmlInit. */
#define NVML_ENTER                                                                                 \
    do {                                                                                           \
        nvmlReturn entered = nvml_enter(__func__, 1);                                              \
        if (entered != NVML_SUCCESS)                                                               \
            return entered;                                                                        \
    } while (0)
/* `gpu`: the index of a device, or return. */
#define NVML_GPU(device)                                                                           \
    NVML_ENTER;                                                                                    \
    if (nvml_index(device) < 0)                                                                    \
        return NVML_INVALID_ARGUMENT;                                                              \
    const unsigned gpu = (unsigned)nvml_index(device)

nvmlReturn nvml_enter(const char *call, int needs_init);
int nvml_index(nvmlDevice device);

#endif
