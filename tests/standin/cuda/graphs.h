/* Graphs. Their nodes run in the order in which they were added. Memory that they allocate lies
 * in one reserve per GPU, which grows when a graph is uploaded or launched. All need the lock. */
#ifndef STANDIN_GRAPHS_H
#define STANDIN_GRAPHS_H

#include "memory.h"
#include "modules.h"

enum node_type { NODE_KERNEL = 0, NODE_MEMCPY = 1, NODE_MEMSET = 2, NODE_HOST = 3, NODE_GRAPH = 4,
                 NODE_EMPTY = 5, NODE_ALLOC = 10, NODE_FREE = 11 };

struct graph_node {
    struct object object;
    enum node_type type;
    uint64_t ns;
    struct allocation *allocation; /* allocation that it makes or frees */
    struct graph *child;
    struct graph *graph;
    struct graph_node *next;
};

struct graph {
    struct object object;
    struct graph_node *first, *last;
    unsigned instances;
};

struct graph *graph_new(void);
struct graph_node *graph_add(struct graph *graph, enum node_type type, uint64_t ns);
/* Add a node that allocates; its address is known at once. */
struct graph_node *graph_add_alloc(struct graph *graph, unsigned gpu, uint64_t bytes);
CUresult graph_add_free(struct graph *graph, struct allocation *allocation);
/* cuMemFree for memory of a graph. */
CUresult graph_memory_free(struct allocation *allocation);
/* Free all memory of graphs on a GPU. */
void graph_memory_reset(unsigned gpu);

#endif
