/* What surrounds each launch of a kernel or graph. */
#ifndef PODFABRIC_GPU_LAUNCHES_H
#define PODFABRIC_GPU_LAUNCHES_H

#include "hooks.h"

enum launch_kind { LAUNCH_KERNEL, LAUNCH_GRAPH };

struct launch {
    int gpu;
};

/* Count a launch, and hold it back while the group has used up its share. */
void before_launch(struct launch *launch, const struct hook *hook, enum launch_kind kind, void *what,
                   void *stream);

/* The driver's answer, which is handed on. */
int after_launch(struct launch *launch, int result);

#endif
