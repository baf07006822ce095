/*
 * Compute shares: launches of a group are delayed so that the group gets its share of the GPU's time.
 * This is the generic cell rate algorithm (ITU-T I.371) with GPU time in place of cells: each launch
 * costs an estimate of its GPU time, divided by the share, and moves the group's theoretical arrival
 * time (`tat` in the region) so far; a launch waits while that is in the future.
 *
 * How a hook of a launch function uses it, at depth 0 and with the depth raised, since the gate
 * calls the driver (the real functions of `struct gate_driver`):
 *
 *     struct gate_launch launch = {.gpu = INDEX, .kind = GATE_KERNEL, .what = f, .stream = stream,
 *                                  .per_thread = IS_PTSZ};
 *     gate_before(&launch);
 *     result = real_cuLaunchKernel(f, …);
 *     gate_after(&launch, result);
 *
 * INDEX is of the current context's GPU in limits and region. A group with one GPU needs no look-up
 * for it: it is 0. cuLaunchCooperativeKernelMultiDevice calls gate_before and gate_after for each of
 * its launches, in order. Legacy calls without a stream (cuLaunch, cuLaunchGrid) pass NULL.
 *
 * Everything here can be called by several threads at the same time. No lock is held while a launch
 * waits, and a process that is killed while it waits leaves nothing behind.
 */
#ifndef PODFABRIC_GPU_GATE_H
#define PODFABRIC_GPU_GATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "layout.h"

enum { GATE_WHOLE = 10000 }; /* pf_gpu_limit.share of a group whose launches are not delayed */

/* The driver's functions, as dlsym(3) finds them in the real library. Those that a driver is too old
   for are NULL: then the gate does without. Results are CUresult; handles are opaque. */
struct gate_driver {
    int (*event_create)(void **event, unsigned flags);                    /* cuEventCreate */
    int (*event_destroy)(void *event);                                    /* cuEventDestroy_v2 */
    int (*event_record)(void *event, void *stream);                       /* cuEventRecord */
    int (*event_record_ptsz)(void *event, void *stream);                  /* cuEventRecord_ptsz */
    int (*event_query)(void *event);                                      /* cuEventQuery */
    int (*event_elapsed)(float *milliseconds, void *start, void *end);    /* cuEventElapsedTime */
    int (*stream_is_capturing)(void *stream, int *status);                /* cuStreamIsCapturing */
    int (*stream_is_capturing_ptsz)(void *stream, int *status);           /* …_ptsz */
    int (*exchange_capture_mode)(int *mode);           /* cuThreadExchangeStreamCaptureMode */
    int (*function_name)(const char **name, void *function);              /* cuFuncGetName */
    int (*kernel_name)(const char **name, void *kernel);                  /* cuKernelGetName */
};

enum gate_kind {
    GATE_KERNEL, /* `what` is a CUfunction, or a CUkernel in its place */
    GATE_GRAPH,  /* `what` is a CUgraphExec */
};

struct gate_launch {
    unsigned gpu;
    enum gate_kind kind;
    const void *what;
    void *stream;
    bool per_thread; /* called by a name that ends in _ptsz: the stream 0 is the thread's own */

    /* The gate's own: */
    void *start; /* the event before a launch that is timed; else NULL */
};

/*
 * Begin: once, after the files are mapped and before the first launch. Both mappings and `driver`
 * stay for good. `limits` must be the mapped file and no copy: the gate reads share and kappa from
 * it at each launch, without `sequence`, since each of them is right alone. Until this is called
 * nothing is delayed.
 */
void gate_open(const struct pf_limits *limits, struct pf_region *region,
               const struct gate_driver *driver);

/* Call before cuCtxDestroy, cuDevicePrimaryCtxReset and cuDevicePrimaryCtxRelease (all versions):
   the gate's timing events go with their context. */
void gate_forget_events(void);

/* Call in the child of a fork: forgets the parent's events and estimates, without the driver. */
void gate_forked(void);

/* ---- the hot path ------------------------------------------------------------------------ */

extern const struct pf_gpu_limit *gate_limits; /* by index; before gate_open, of no limit */

void gate_admit(struct gate_launch *launch);
void gate_timed(struct gate_launch *launch, int result);

/* Wait until the launch may go to the driver. Free if the group has the whole GPU. */
static inline void gate_before(struct gate_launch *launch)
{
    const struct pf_gpu_limit *limit = &gate_limits[launch->gpu];

    launch->start = NULL;
    if (__builtin_expect(__atomic_load_n(&limit->share, __ATOMIC_RELAXED) != GATE_WHOLE ||
                             limit->count_launches,
                         0))
        gate_admit(launch);
}

/* The launch has gone to the driver, which answered so. */
static inline void gate_after(struct gate_launch *launch, int result)
{
    if (__builtin_expect(launch->start != NULL, 0))
        gate_timed(launch, result);
}

#endif
