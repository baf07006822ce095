/* The exports of libnvidia-ml.so.1 that the shim replaces, so that NVML agrees with cuMemGetInfo.
   Structures as in nvml.h of driver 615 and in nvidia-ml-py 13.615. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "group.h"
#include "old_glibc.h"
#include "say.h"

#define REAL_LIBRARY "libpfnvidia-ml-real.so.1"
#define EXPORTED __attribute__((visibility("default")))

enum { NVML_SUCCESS = 0, NVML_FUNCTION_NOT_FOUND = 13, NVML_NOT_READY = 27 };
enum { UUID_BYTES = 96 }; /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */

struct nvml_memory {
    uint64_t total, free, used;
};

struct nvml_memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

_Static_assert(sizeof(struct nvml_memory_v2) == 40, "abi");

static int (*get_uuid)(void *device, char *text, unsigned size);
static int (*get_memory)(void *device, struct nvml_memory *memory);
static int (*get_memory_v2)(void *device, struct nvml_memory_v2 *memory);

static bool is_ours(void *device)
{
    char text[UUID_BYTES] = "";
    uint8_t uuid[16];

    if (!get_uuid || get_uuid(device, text, sizeof text) != NVML_SUCCESS)
        return false;
    const char *at = strchr(text, '-'); /* of "GPU-01234567-89ab-…": each byte has two digits */
    for (int i = 0; at && i < 16; i++) {
        at += *at == '-';
        if (sscanf(at, "%2hhx", &uuid[i]) != 1)
            return false;
        at += 2;
    }
    return at && group_has_gpu(uuid);
}

static void limit(uint64_t *total, uint64_t *free, uint64_t *used)
{
    struct group_usage usage = group_usage();
    uint64_t left = usage.limit_bytes > usage.used_bytes ? usage.limit_bytes - usage.used_bytes : 0;

    *total = *total < usage.limit_bytes ? *total : usage.limit_bytes;
    *free = *free < left ? *free : left;
    *used = usage.used_bytes;
}

EXPORTED int nvmlDeviceGetMemoryInfo(void *device, struct nvml_memory *memory)
{
    if (!get_memory)
        return NVML_FUNCTION_NOT_FOUND;
    if (!group_look())
        return NVML_NOT_READY;
    int result = get_memory(device, memory);

    if (result == NVML_SUCCESS && is_ours(device))
        limit(&memory->total, &memory->free, &memory->used);
    return result;
}

EXPORTED int nvmlDeviceGetMemoryInfo_v2(void *device, struct nvml_memory_v2 *memory)
{
    if (!get_memory_v2)
        return NVML_FUNCTION_NOT_FOUND;
    if (!group_look())
        return NVML_NOT_READY;
    int result = get_memory_v2(device, memory);

    if (result != NVML_SUCCESS || !is_ours(device))
        return result;
    uint64_t total = memory->total;

    limit(&memory->total, &memory->free, &memory->used);
    if (memory->total < total)
        memory->reserved = 0; /* the driver keeps that of the GPU, not of the group's part */
    return result;
}

__attribute__((constructor)) static void load(void)
{
    void *library = dlopen(REAL_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);

    if (!library) {
        say("NVIDIA's library is not loaded as " REAL_LIBRARY ": no information about GPUs is available");
        return;
    }
#define FIND(POINTER, NAME) POINTER = (__typeof__(POINTER))dlsym(library, #NAME)
    FIND(get_uuid, nvmlDeviceGetUUID);
    FIND(get_memory, nvmlDeviceGetMemoryInfo);
    FIND(get_memory_v2, nvmlDeviceGetMemoryInfo_v2);
#undef FIND
}
