/* Hooks of the functions that launch kernels and graphs. Each launch passes the gate. */
#include "gate.h"

#include <time.h>

#include "hooks.h"
#include "process.h"

void before_launch(struct gate_launch *launch, const struct hook *hook, enum gate_kind kind,
                   void *what, void *stream)
{
    struct timespec now;

    *launch = (struct gate_launch){.kind = kind, .what = what, .stream = stream_of(hook, stream)};
    if (!region)
        return;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    __atomic_fetch_add(&region->gpu.launches, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&region->gpu.last_launch,
                     (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec, __ATOMIC_RELAXED);
    launch->limit = &limits_file->gpu;
    launch->gpu = &region->gpu;
    gate_before(launch);
}

#define LAUNCH(ABI, WHAT, STREAM)                                    \
    struct gate_launch launch;                                       \
    before_launch(&launch, hook, GATE_KERNEL, WHAT, STREAM);         \
    return gate_after(&launch, REAL(hook, ABI)(ARGS_##ABI))

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
