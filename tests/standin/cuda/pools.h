/* Memory pools, from which memory is taken in the order of a stream. */
#ifndef STANDIN_POOLS_H
#define STANDIN_POOLS_H

#include "objects.h"

/* Give back what the GPU's pools keep beyond their thresholds: done when the CPU waits for work. */
void pools_release_unused(unsigned gpu);

#endif
