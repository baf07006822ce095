/* Counts and delays launches of kernels and graphs. */
#ifndef PODFABRIC_GPU_LAUNCHES_H
#define PODFABRIC_GPU_LAUNCHES_H

#include "gate.h"
#include "hooks.h"

/* Count a launch, and delay it while the group has used up its share. */
void before_launch(struct gate_launch *launch, const struct hook *hook, enum gate_kind kind,
                   void *what, void *stream);

/* Returns the driver's result. */
int after_launch(struct gate_launch *launch, int result);

#endif
