#include "launches.h"

#include <time.h>

#include "devices.h"
#include "group.h"
#include "process.h"

/* A group with one GPU has no other: that saves a question to the driver at each launch. */
static int launching_gpu(void)
{
    int gpu = 0;

    if (group_gpus() != 1 && current_gpu(&gpu) != CU_SUCCESS)
        return GROUP_NO_GPU;
    return gpu;
}

/* Count a launch on a GPU of the group, and wait for its turn. */
static void begin(struct gate_launch *launch, int index)
{
    struct pf_gpu *gpu = group_launches(index);
    struct timespec now;

    if (!gpu)
        return;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    __atomic_fetch_add(&gpu->launches, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&gpu->last_launch, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec,
                     __ATOMIC_RELAXED);
    launch->limit = &limits_file->gpu[index];
    launch->gpu = gpu;
    launch->index = (unsigned)index;
    gate_before(launch);
}

void before_launch(struct gate_launch *launch, const struct hook *hook, enum gate_kind kind,
                   void *what, void *stream)
{
    *launch = (struct gate_launch){.kind = kind, .what = what, .stream = stream_of(hook, stream)};
    begin(launch, launching_gpu());
}

int after_launch(struct gate_launch *launch, int result)
{
    gate_after(launch, result);
    return result;
}

#define LAUNCH(ABI, WHAT, STREAM)                                    \
    struct gate_launch launch;                                       \
    before_launch(&launch, hook, GATE_KERNEL, WHAT, STREAM);         \
    return after_launch(&launch, REAL(hook, ABI)(ARGS_##ABI))

int on_kernel(const struct hook *hook, PARAMS_kernel)
{
    LAUNCH(kernel, function, stream);
}

int on_kernel_ex(const struct hook *hook, PARAMS_kernel_ex)
{
    LAUNCH(kernel_ex, function, config ? config->stream : NULL);
}

int on_cooperative(const struct hook *hook, PARAMS_cooperative)
{
    LAUNCH(cooperative, function, stream);
}

int on_legacy(const struct hook *hook, PARAMS_legacy)
{
    LAUNCH(legacy, function, NULL);
}

int on_grid(const struct hook *hook, PARAMS_grid)
{
    LAUNCH(grid, function, NULL);
}

int on_grid_async(const struct hook *hook, PARAMS_grid_async)
{
    LAUNCH(grid_async, function, stream);
}

/* One kernel on several devices, each of which its stream tells. They start together, so that all of
   them wait before any is launched, and none of them is timed. */
int on_kernels(const struct hook *hook, PARAMS_kernels)
{
    for (unsigned i = 0; launches && i < count; i++) {
        struct gate_launch launch = {.kind = GATE_KERNEL, .what = launches[i].function,
                                     .stream = stream_of(hook, launches[i].stream)};
        int device = 0, result = device_of_stream(launch.stream, &device);

        begin(&launch, result == CU_SUCCESS ? gpu_of_device(device) : GROUP_NO_GPU);
        after_launch(&launch, CU_NOT_SUPPORTED);
    }
    return REAL(hook, kernels)(ARGS_kernels);
}
