/*
 * Launches that are timed with two events in their own stream. They tell how long kernels take, and
 * which launches are not finished: each stands also for the launches since the one before it that was
 * timed.
 */
#ifndef PODFABRIC_GPU_TIMINGS_H
#define PODFABRIC_GPU_TIMINGS_H

#include "gate.h"

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
