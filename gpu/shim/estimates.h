/*
 * How much GPU time a kernel or graph takes, as far as this process has seen: by the handle of the
 * function or executable graph. The first launches of each, and then every 64th, are timed with two
 * events in the launch's own stream.
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
uint64_t estimate_ns(struct estimate *estimate);

/* Whether launches must not be held back: kernels of NCCL. Each rank of a collective spins on
   its GPU until all have begun. */
bool estimate_is_spared(const struct estimate *estimate);

/* Whether launches should wait for the first measurement, since some have begun and none is
   done: else a program could give the driver a thousand long kernels at the price of short ones. */
bool estimate_is_due(const struct estimate *estimate);

/* Count a launch. If it is one to be timed, record an event before it in `launch->start`;
   gate_timed records the one after it. */
void estimate_begin(struct gate_launch *launch);

/* Take the measurements that are done by now, unless another thread does. */
void estimates_update(uint64_t now);

#endif
