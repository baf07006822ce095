/* Memory with a device address. */
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include "objects.h"

struct pool;

struct allocation {
    struct object object; /* its length is what is asked, rounded up */
    enum kind kind;
    uint64_t asked;
    struct pool *pool; /* that it is from; NULL: none */
    int of_another; /* process, which is charged */
    int of_graph;      /* its memory comes and goes with launches of a graph */
    int live;          /* of a graph's: between a launch and its being freed */
};

/* These need the lock. */
/* Free what cuMemFree, or the end of a context, frees. */
CUresult allocation_release(struct allocation *allocation);
/* arrays.c: free an array, with its levels. */
void array_release(struct object *array);

#endif
