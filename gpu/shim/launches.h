/* What surrounds each launch of a kernel or graph. */
#ifndef PODFABRIC_GPU_LAUNCHES_H
#define PODFABRIC_GPU_LAUNCHES_H

#include "gate.h"
#include "hooks.h"

/* Count a launch, and hold it back while the group has used up its share. */
void before_launch(struct gate_launch *launch, const struct hook *hook, enum gate_kind kind,
                   void *what, void *stream);

/* The driver's answer, which is handed on. */
int after_launch(struct gate_launch *launch, int result);

#endif
