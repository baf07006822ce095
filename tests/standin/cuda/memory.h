/* Memory with a device address. */
#ifndef STANDIN_MEMORY_H
#define STANDIN_MEMORY_H

#include "objects.h"

struct pool;

struct allocation {
    struct object object; /* its length is the requested size, rounded up */
    enum kind kind;
    uint64_t asked;
    struct pool *pool; /* the pool that it is from; NULL: none */
    int of_another; /* another process made it and is charged */
    int of_graph;      /* launches of a graph allocate and free it */
    int live;          /* of a graph: allocated by a launch and not freed yet */
};

/* These need the lock. */
/* Free an allocation, as cuMemFree or the end of a context does. */
CUresult allocation_release(struct allocation *allocation);
/* arrays.c: free an array, with its levels. */
void array_release(struct object *array);

#endif
