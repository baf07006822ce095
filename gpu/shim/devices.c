#include "devices.h"

#include <stddef.h>
#include <string.h>

#include "driver.h"
#include "group.h"
#include "hooks.h"
#include "process.h"
#include "say.h"

static int look_up(int device)
{
    uint8_t uuid[16] = {0};
    int (*ask)(uint8_t *, int) = driver.cuDeviceGetUuid_v2 ? driver.cuDeviceGetUuid_v2
                                                           : driver.cuDeviceGetUuid;

    if (!ask || ask(uuid, device) != CU_SUCCESS)
        return GROUP_NO_GPU;
    int gpu = group_gpu(uuid);

    if (gpu == GROUP_NO_GPU)
        COMPLAIN("GPU %d was not given to this container: it gets no memory there", device);
    return gpu;
}

int gpu_of_device(int device)
{
    if (!process || device < 0 || device >= ORDINALS)
        return GROUP_NO_GPU;
    int known = atomic_load_explicit(&process->ordinal[device].gpu, memory_order_relaxed);

    if (known == 0 && group_gpus() > 0) {
        known = look_up(device) + 2;
        atomic_store(&process->ordinal[device].gpu, known);
    }
    return known == 0 ? GROUP_NO_GPU : known - 2;
}

int current_gpu(int *gpu)
{
    int device = 0;
    int result = driver.cuCtxGetDevice(&device);

    *gpu = result == CU_SUCCESS ? gpu_of_device(device) : GROUP_NO_GPU;
    return result;
}

int current_owner(struct entry *entry)
{
    int gpu = GROUP_NO_GPU;
    void *context = NULL;

    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    int result = current_gpu(&gpu);

    if (result == CU_SUCCESS)
        result = driver.cuCtxGetCurrent(&context);
    entry->gpu = (int8_t)gpu;
    entry->owner = (uintptr_t)context;
    return result;
}

int device_of_stream(void *stream, int *device)
{
    void *context = NULL, *current = NULL;

    /* The streams 0, 1 and 2 are those of the current context. */
    if ((uintptr_t)stream > 2 && driver.cuStreamGetCtx &&
        driver.cuStreamGetCtx(stream, &context) == CU_SUCCESS &&
        driver.cuCtxGetCurrent(&current) == CU_SUCCESS && context && context != current &&
        driver.cuCtxPushCurrent_v2(context) == CU_SUCCESS) {
        int result = driver.cuCtxGetDevice(device);

        driver.cuCtxPopCurrent_v2(&context);
        return result;
    }
    return driver.cuCtxGetDevice(device);
}

bool is_capturing(void *stream)
{
    int status = CU_CAPTURE_NONE;

    if (!driver.cuStreamIsCapturing)
        return false;
    /* An error is that the legacy stream waits for one that captures: the call itself will fail. */
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

bool charge(int gpu, uint64_t bytes)
{
    if (group_charge(gpu, bytes))
        return true;
    int mode = begin_own_calls();

    trim_pools(gpu);
    trim_graphs(gpu);
    end_own_calls(mode);
    if (group_charge(gpu, bytes)) /* another thread may have given up what there was, too */
        return true;
    group_denied(gpu);
    return false;
}

int on_init(const struct hook *hook, PARAMS_flags)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    return REAL(hook, flags)(ARGS_flags);
}
