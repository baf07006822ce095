/* Finds the GPU on which a call allocates memory, and charges the group for an allocation. */
#include "devices.h"

#include <stddef.h>

#include "group.h"
#include "hooks.h"
#include "process.h"
#include "say.h"

enum place place_of_device(int device)
{
    uint8_t uuid[16] = {0};

    if (!process)
        return FOREIGN;
    int known = atomic_load_explicit(&process->device, memory_order_relaxed);

    if (known != 0)
        return device == known - 1 ? OURS : FOREIGN;
    if (!driver.cuDeviceGetUuid || driver.cuDeviceGetUuid(uuid, device) != CU_SUCCESS)
        return FOREIGN;
    if (!group_has_gpu(uuid)) {
        COMPLAIN("GPU %d is not allocated to this container: it gets no memory there", device);
        return FOREIGN;
    }
    atomic_store(&process->device, device + 1);
    return OURS;
}

enum place place_of_location(const struct cu_location *location)
{
    if (location->type == CU_ON_DEVICE)
        return place_of_device(location->id);
    if (location->type == CU_IN_LOCALITY_DOMAIN)
        return place_of_device(location->id & 0xff);
    return UNCOUNTED;
}

int our_device(void)
{
    return process ? atomic_load(&process->device) - 1 : -1;
}

int current_place(enum place *place)
{
    int device = 0;
    int result = driver.cuCtxGetDevice(&device);

    *place = result == CU_SUCCESS ? place_of_device(device) : FOREIGN;
    return result;
}

bool is_capturing(void *stream)
{
    int status = CU_CAPTURE_NONE;

    if (!driver.cuStreamIsCapturing)
        return false;
    /* The driver returns an error if another stream's capture blocks the legacy stream: the call fails. */
    return driver.cuStreamIsCapturing(stream, &status) != CU_SUCCESS || status != CU_CAPTURE_NONE;
}

int begin_own_calls(void)
{
    int mode = CU_CAPTURE_RELAXED;

    if (driver.cuThreadExchangeStreamCaptureMode)
        driver.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void end_own_calls(int mode)
{
    if (driver.cuThreadExchangeStreamCaptureMode)
        driver.cuThreadExchangeStreamCaptureMode(&mode);
}

bool charge(enum place place, uint64_t bytes)
{
    if (place != OURS)
        return false;
    if (group_charge(bytes))
        return true;
    int mode = begin_own_calls();

    trim_pools();
    trim_graphs();
    end_own_calls(mode);
    if (group_charge(bytes)) /* another thread may have released memory, too */
        return true;
    group_denied();
    return false;
}

int begin_allocation(struct entry *entry)
{
    enum place place;
    void *context = NULL;

    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    int result = current_place(&place);

    if (result == CU_SUCCESS)
        result = driver.cuCtxGetCurrent(&context);
    if (result != CU_SUCCESS)
        return result;
    entry->place = (uint8_t)place;
    entry->owner = (uintptr_t)context;
    return charge(place, entry->bytes) ? CU_SUCCESS : CU_OUT_OF_MEMORY;
}

int finish_allocation(int result, struct entry *entry, uint64_t key)
{
    entry->key = key;
    if (result == CU_SUCCESS)
        table_put(entry); /* without memory for the entry it stays counted */
    else
        group_release(entry->bytes);
    return result;
}

int on_init(const struct hook *hook, PARAMS_flags)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    return REAL(hook, flags)(ARGS_flags);
}

/* Versions before CUDA 3.2, with addresses and sizes of 32 bits. */
int on_former(const struct hook *hook, PARAMS_former)
{
    return CU_NOT_SUPPORTED;
}
