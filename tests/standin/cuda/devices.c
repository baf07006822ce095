/* Devices, as CUDA_VISIBLE_DEVICES shows them. */
#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned visible[MOST_GPUS], visible_number;

static int same_uuid(const char *wanted, size_t length, const char *uuid)
{
    return length >= 5 && length <= strlen(uuid) && strncmp(wanted, uuid, length) == 0;
}

/* The driver's rules: indices, or beginnings of UUIDs, up to the first entry without a GPU. */
void visible_read(void)
{
    const struct node *node = node_get();
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    visible_number = 0;
    for (unsigned i = 0; wanted == NULL && i < node->opened_count; i++)
        visible[visible_number++] = node->opened[i];
    while (wanted != NULL && *wanted != 0) {
        char *end;
        size_t length = strcspn(wanted, ",");
        unsigned long one = strtoul(wanted, &end, 10);
        if (end == wanted || end != wanted + length)
            for (one = 0; one < node->opened_count; one++)
                if (same_uuid(wanted, length, node->gpus[node->opened[one]].uuid))
                    break;
        if (one >= node->opened_count)
            return;
        unsigned gpu = node->opened[one];
        for (unsigned i = 0; i < visible_number; i++)
            if (visible[i] == gpu) { /* named twice: none is visible */
                visible_number = 0;
                return;
            }
        visible[visible_number++] = gpu;
        wanted += length + (wanted[length] == ',');
    }
}

unsigned visible_count(void)
{
    return visible_number;
}

int gpu_of(CUdevice device)
{
    return device < 0 || (unsigned)device >= visible_number ? -1 : (int)visible[device];
}

CUdevice device_of(unsigned gpu)
{
    for (unsigned i = 0; i < visible_number; i++)
        if (visible[i] == gpu)
            return (CUdevice)i;
    return -1;
}

PUBLIC CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount);
    if (count == NULL)
        return INVALID_VALUE;
    *count = (int)visible_number;
    return SUCCESS;
}

PUBLIC CUresult cuDeviceGetUuid(unsigned char uuid[16], CUdevice device)
{
    ENTER(cuDeviceGetUuid);
    GPU_OF(device);
    node_uuid_bytes(card, uuid);
    return SUCCESS;
}

PUBLIC CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device)
{
    ENTER(cuDeviceGetUuid_v2);
    GPU_OF(device);
    node_uuid_bytes(card, uuid);
    return SUCCESS;
}

static uint32_t saturated(uint64_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
}

PUBLIC CUresult cuDeviceTotalMem(uint32_t *bytes, CUdevice device)
{
    uint64_t free_bytes, total;
    ENTER(cuDeviceTotalMem);
    GPU_OF(device);
    ledger_free_and_total(gpu, &free_bytes, &total);
    *bytes = saturated(total);
    return SUCCESS;
}

PUBLIC CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    uint64_t free_bytes, total;
    ENTER(cuDeviceTotalMem_v2);
    GPU_OF(device);
    ledger_free_and_total(gpu, &free_bytes, &total);
    *bytes = total;
    return SUCCESS;
}
