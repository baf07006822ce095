/* Compute shares: the gate delays a group's launches so that the group gets its share of a GPU's time.
   It is the generic cell rate algorithm (ITU-T I.371) with GPU time in place of cells. A launch costs
   its estimated GPU time, times kappa, divided by the share. The cost moves the group's theoretical
   arrival time (`tat` in the region). A launch waits while `tat` is in the future.

   Queued launches cannot be recalled. So a launch also waits while its stream has much unfinished work
   of this process. This wait limits the effect of estimates that are too small.

   No thread holds a lock while it waits. A killed thread leaves nothing that other threads wait for. */
#ifndef PODFABRIC_GPU_GATE_H
#define PODFABRIC_GPU_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum { GATE_WHOLE = 10000 }; /* pf_gpu_limit.share of a group without delays */

enum gate_kind {
    GATE_KERNEL, /* `what` is a CUfunction or CUkernel */
    GATE_GRAPH,  /* `what` is a CUgraphExec */
};

struct gate_time {
    uint64_t ns;      /* estimated GPU time */
    uint64_t paid_ns; /* the payment for it */
};

struct gate_launch {
    const struct pf_gpu_limit *limit; /* in the mapped file, since the share changes at any time */
    struct pf_gpu *gpu;
    enum gate_kind kind;
    void *what;
    void *stream; /* as functions without _ptsz understand it */

    /* The gate's own: */
    struct gate_time time;
    void *start; /* the event before a timed launch; else NULL */
    struct estimate *estimate;
};

void gate_admit(struct gate_launch *launch);
void gate_timed(struct gate_launch *launch, int result);

/* Wait until the launch may go to the driver. With the whole share this is a load and a branch. */
static inline void gate_before(struct gate_launch *launch)
{
    launch->start = NULL;
    if (__builtin_expect(__atomic_load_n(&launch->limit->share, __ATOMIC_RELAXED) < GATE_WHOLE, 0))
        gate_admit(launch);
}

/* Returns the driver's result. A failed launch is not timed. */
static inline int gate_after(struct gate_launch *launch, int result)
{
    if (__builtin_expect(launch->start != NULL, 0))
        gate_timed(launch, result);
    return result;
}

/* launches.c: count a launch, and delay it while the group has used up its share. */
struct hook;
void before_launch(struct gate_launch *launch, const struct hook *hook, enum gate_kind kind,
                   void *what, void *stream);

/* Call before a context is destroyed, reset or released: its timing events go with it. */
void gate_forget_events(void);

#define LOAD(PLACE) __atomic_load_n(&(PLACE), __ATOMIC_RELAXED)
#define STORE(PLACE, VALUE) __atomic_store_n(&(PLACE), (VALUE), __ATOMIC_RELAXED)
#define ADD(PLACE, VALUE) __atomic_fetch_add(&(PLACE), (VALUE), __ATOMIC_RELAXED)

/* CLOCK_MONOTONIC, ns. */
uint64_t gate_now(void);

/* Charge the group for GPU time beyond earlier estimates, without waiting. Returns the payment. */
struct gate_time gate_charge(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns);

/* estimates.c: a measured GPU time includes the time slices of other containers, and maybe the loading
   of code. So an estimate is the lower quartile of the last measurements. */

/* Find or make an estimate. NULL: no memory, or `what` is NULL. */
struct estimate *estimate_of(enum gate_kind kind, void *what);

/* GPU time of one launch, ns. */
uint64_t estimate_ns(const struct estimate *estimate);

/* NCCL's kernels must not wait: each rank spins on its GPU until all ranks have begun. */
bool estimate_is_spared(const struct estimate *estimate);

/* Whether to wait for the first measurement: long kernels must not pay like short ones. */
bool estimate_is_due(const struct estimate *estimate);

/* Count a launch that has paid. Returns whether to time it. */
bool estimate_counts(struct estimate *estimate);

void estimate_timing_begins(struct estimate *estimate, const void *what);
void estimate_timing_ends(struct estimate *estimate, const void *what);

/* One thread at a time. Returns the ns that earlier launches used beyond their payments. */
uint64_t estimate_measured(struct estimate *estimate, const void *what, uint64_t ns);

/* timings.c times launches with two events in their stream, which also shows what is unfinished. */

/* Count a launch. If it is to be timed, record the event `launch->start`. */
void timing_begin(struct gate_launch *launch);

/* Take the finished timings, unless another thread does. */
void timings_update(uint64_t now);

/* Whether a recent look found an unfinished launch of this process. */
bool timings_unfinished(uint64_t now);

/* Whether the estimates of this process' unfinished launches in the stream exceed `most` ns. */
bool timings_queue(const void *stream, uint64_t most);

#endif
