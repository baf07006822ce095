/* Memory pools, from which memory is allocated in the order of a stream. Each reserves multiples
 * of the node's `pool_chunk`. It keeps freed memory until the CPU waits for work, or, up to its
 * release threshold, longer. All need the lock. */
#ifndef STANDIN_POOLS_H
#define STANDIN_POOLS_H

#include "memory.h"

/* A chunked reserve of a GPU's memory: a pool's, or that of graphs. */
struct reserve {
    uint64_t reserved, used, reserved_peak, used_peak;
};

/* Increase `used`, and the reserve with it; -1 if that does not fit. `most` is a limit, or 0. */
int reserve_use(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t bytes, uint64_t most);
/* Give back reserved memory beyond the used bytes and `keep`. */
void reserve_trim(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t keep);

/* The GPU's own pool, from which cuMemAllocAsync takes. */
struct object *pool_default(unsigned gpu);

void pool_take_back(struct allocation *allocation);
/* Give back the pools' memory beyond their thresholds, when the CPU waits for work. */
void pools_release_unused(unsigned gpu);
/* Free all memory from pools of a GPU, at the end of its primary context. */
void pools_reset(unsigned gpu);

#endif
