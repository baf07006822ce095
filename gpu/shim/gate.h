/*
 * Compute shares: launches of a group are held back so that the group gets its share of a GPU's
 * time. This is the generic cell rate algorithm (ITU-T I.371) with GPU time in place of cells. A
 * launch costs what its kernel or graph is estimated to take (estimates.c), times kappa, divided by
 * the share, and moves the group's theoretical arrival time (`tat` in the region) that far. A
 * launch waits while `tat` is in the future, so one kernel may be longer than the burst: the next
 * ones pay for it.
 *
 * What the driver has queued cannot be called back. So a launch also waits while its stream has more
 * than a little unfinished work of this process: what estimates that are too small let through is
 * little then. Such a wait costs the group nothing of its share.
 *
 * A hook of a launch function, at raised depth since the gate calls the driver:
 *
 *     struct gate_launch launch = {.limit = &limits_file->gpu, .gpu = &region->gpu,
 *                                  .kind = GATE_KERNEL, .what = function, .stream = stream};
 *     gate_before(&launch);
 *     result = the real function;
 *     gate_after(&launch, result);
 *
 * `limit` must be in the mapped file and not in a copy, since a share changes at any time; each value is read alone, without `sequence`. Several threads may be
 * here at the same time. None holds a lock while it waits, and one that is killed there leaves
 * nothing that others wait for.
 */
#ifndef PODFABRIC_GPU_GATE_H
#define PODFABRIC_GPU_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum { GATE_WHOLE = 10000 }; /* pf_gpu_limit.share of a group whose launches are not held back */

enum gate_kind {
    GATE_KERNEL, /* `what` is a CUfunction, or a CUkernel in its place */
    GATE_GRAPH,  /* `what` is a CUgraphExec */
};

struct gate_time {
    uint64_t ns;      /* of the GPU, as estimated */
    uint64_t paid_ns; /* what was paid for it */
};

struct gate_launch {
    const struct pf_gpu_limit *limit;
    struct pf_gpu *gpu;
    enum gate_kind kind;
    void *what;
    void *stream; /* as functions without _ptsz understand it */

    /* The gate's own: */
    struct gate_time time;
    void *start;               /* an event before the launch, if this one is timed; else NULL */
    struct estimate *estimate; /* that the time is for */
};

void gate_admit(struct gate_launch *launch);
void gate_timed(struct gate_launch *launch, int result);

/* Wait until the launch may go to the driver. Costs a load and a branch with a share of all. */
static inline void gate_before(struct gate_launch *launch)
{
    launch->start = NULL;
    if (__builtin_expect(__atomic_load_n(&launch->limit->share, __ATOMIC_RELAXED) < GATE_WHOLE, 0))
        gate_admit(launch);
}

/* The driver has answered the launch. An error is that it did not begin, so it is not timed. */
static inline void gate_after(struct gate_launch *launch, int result)
{
    if (__builtin_expect(launch->start != NULL, 0))
        gate_timed(launch, result);
}

/* Call before a context is destroyed, or a primary one reset or released: events for timing go with
   their context. */
void gate_forget_events(void);

/* ---- for the gate's own parts -------------------------------------------------------------- */

#define LOAD(PLACE) __atomic_load_n(&(PLACE), __ATOMIC_RELAXED)
#define STORE(PLACE, VALUE) __atomic_store_n(&(PLACE), (VALUE), __ATOMIC_RELAXED)
#define ADD(PLACE, VALUE) __atomic_fetch_add(&(PLACE), (VALUE), __ATOMIC_RELAXED)

/* CLOCK_MONOTONIC, ns. */
uint64_t gate_now(void);

/* Let the group pay for GPU time that launches before were not estimated at, without waiting. Returns
   what it paid. */
struct gate_time gate_charge(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns);

/* estimates.c: how much GPU time a kernel or graph takes, as far as this process has seen: by the handle
   of the function or executable graph. While several containers use a GPU a measured time has the time
   slices of the others in it, and before the first launch of a function the driver may load its code.
   So an estimate is made of the lower quartile of the last measurements. */

/* The estimate for what is launched; made if there is none. NULL: no memory, or nothing is
   launched. */
struct estimate *estimate_of(enum gate_kind kind, void *what);

/* GPU time of one launch, ns. */
uint64_t estimate_ns(const struct estimate *estimate);

/* Whether launches must not be held back: kernels of NCCL. Each rank of a collective spins on
   its GPU until all have begun. */
bool estimate_is_spared(const struct estimate *estimate);

/* Whether launches should wait for the first measurement, since some have begun and none is
   done: else a program could give the driver a thousand long kernels at the price of short ones. */
bool estimate_is_due(const struct estimate *estimate);

/* Count a launch that was paid for; whether it is one to be timed. */
bool estimate_counts(struct estimate *estimate);

/* A timing of what the estimate is for has begun. */
void estimate_timing_begins(struct estimate *estimate, const void *what);

/* It is over. */
void estimate_timing_ends(struct estimate *estimate, const void *what);

/* Take what a timing measured; one thread at a time. Returns the GPU time that launches until now
   took beyond what was charged for them, ns: not 0 only after the first ones. */
uint64_t estimate_measured(struct estimate *estimate, const void *what, uint64_t ns);

/* timings.c: launches that are timed with two events in their own stream. They tell how long kernels
   take, and which launches are not finished: each stands also for the launches since the one before it
   that was timed. */

/* Count a launch. If it is one to be timed, record an event before it in `launch->start`;
   gate_timed records the one after it. */
void timing_begin(struct gate_launch *launch);

/* Take the timings that are done by now, unless another thread does. */
void timings_update(uint64_t now);

/* Whether a launch of this process is not finished, by a look just now. */
bool timings_unfinished(uint64_t now);

/* Whether unfinished launches of this process in the stream need more than `most`, as estimated, ns. */
bool timings_queue(const void *stream, uint64_t most);

#endif
