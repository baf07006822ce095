/*
 * How much GPU time a kernel or graph takes, as far as this process has seen: by the handle of the
 * function or executable graph. The first launches of each, and then every 64th, are timed
 * (timings.h).
 *
 * While several containers use a GPU a measured time has the time slices of the others in it, and
 * before the first launch of a function the driver may load its code. So an estimate is made of the
 * lower quartile of the last measurements.
 */
#ifndef PODFABRIC_GPU_ESTIMATES_H
#define PODFABRIC_GPU_ESTIMATES_H

#include "gate.h"

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

#endif
