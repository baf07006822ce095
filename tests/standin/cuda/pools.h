/* Memory pools, from which memory is taken in the order of a stream. Each reserves multiples of
 * the node's `pool_chunk`, and keeps what is freed until the CPU waits for work, or longer: up
 * to its release threshold. All need the lock. */
#ifndef STANDIN_POOLS_H
#define STANDIN_POOLS_H

#include "memory.h"

/* What a chunked reserve of a GPU's memory looks like: a pool's, or that of graphs. */
struct reserve {
    uint64_t reserved, used, reserved_peak, used_peak;
};

/* Make `used` grow, and the reserve with it; -1 where that does not fit. `most` is 0 or a limit. */
int reserve_use(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t bytes, uint64_t most);
/* Give back what is reserved beyond what is used and beyond `keep`. */
void reserve_trim(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t keep);

/* The GPU's own pool, from which cuMemAllocAsync takes. */
struct object *pool_default(unsigned gpu);

void pool_take_back(struct allocation *allocation);
/* Give back what the GPU's pools keep beyond their thresholds: done when the CPU waits for work. */
void pools_release_unused(unsigned gpu);
/* Free all memory from pools of a GPU: what the end of its primary context does. */
void pools_reset(unsigned gpu);

#endif
