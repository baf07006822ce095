#include "graphs.h"

struct graph *graph_new(void)
{
    return object_new(sizeof(struct graph), GRAPH, 0, 0, 0, NULL);
}

struct graph_node *graph_add(struct graph *graph, enum node_type type, uint64_t ns)
{
    struct graph_node *made = object_new(sizeof *made, GRAPH_NODE, 0, 0, 0, NULL);
    made->type = type;
    made->ns = ns;
    made->graph = graph;
    if (graph->last != NULL)
        graph->last->next = made;
    else
        graph->first = made;
    graph->last = made;
    return made;
}

struct graph_node *graph_add_alloc(struct graph *graph, unsigned gpu, uint64_t bytes)
{
    uint64_t length = (bytes + 511) / 512 * 512;
    struct graph_node *node = graph_add(graph, NODE_ALLOC, 0);
    node->allocation = object_new(sizeof *node->allocation, ALLOCATION, gpu, address_take(length, 512),
                                  length, NULL);
    node->allocation->asked = bytes;
    node->allocation->of_graph = 1;
    return node;
}

CUresult graph_add_free(struct graph *graph, struct allocation *allocation)
{
    if (allocation == NULL || !allocation->of_graph)
        return INVALID_VALUE;
    graph_add(graph, NODE_FREE, 0)->allocation = allocation;
    return SUCCESS;
}

PUBLIC CUresult cuGraphCreate(CUhandle *graph, unsigned flags)
{
    ENTER(cuGraphCreate);
    LOCKED;
    if (graph == NULL || flags != 0)
        return INVALID_VALUE;
    *graph = &graph_new()->object;
    return SUCCESS;
}

PUBLIC CUresult cuGraphDestroy(CUhandle handle)
{
    ENTER(cuGraphDestroy);
    LOCKED;
    struct graph *graph = object_of(handle, GRAPH);
    if (graph == NULL)
        return INVALID_VALUE;
    for (struct graph_node *node = graph->first; node != NULL; node = node->next)
        object_destroy(&node->object);
    object_destroy(&graph->object);
    return SUCCESS;
}

/* The graph to which a node is added; the preceding nodes must be its own. */
static CUresult graph_of(CUhandle handle, const CUhandle *first, size_t count, struct graph **found)
{
    *found = object_of(handle, GRAPH);
    if (*found == NULL)
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const struct graph_node *node = first != NULL ? object_of(first[i], GRAPH_NODE) : NULL;
        if (node == NULL || node->graph != *found)
            return INVALID_VALUE;
    }
    return SUCCESS;
}

static CUresult add_plain(CUhandle *node, CUhandle handle, const CUhandle *first, size_t count,
                          enum node_type type)
{
    struct graph *graph;
    LOCKED;
    TRY(graph_of(handle, first, count, &graph));
    *node = &graph_add(graph, type, 0)->object;
    return SUCCESS;
}

static CUresult add_kernel(CUhandle *node, CUhandle handle, const CUhandle *first, size_t count,
                           CUhandle kernel)
{
    struct graph *graph;
    LOCKED;
    TRY(graph_of(handle, first, count, &graph));
    const struct function *function = object_of(kernel, FUNCTION);
    if (function == NULL)
        return INVALID_VALUE;
    *node = &graph_add(graph, NODE_KERNEL, function->ns)->object;
    return SUCCESS;
}

static CUresult add_alloc(CUhandle *node, CUhandle handle, const CUhandle *first, size_t count,
                          struct memory_node *memory)
{
    struct graph *graph;
    LOCKED;
    TRY(graph_of(handle, first, count, &graph));
    if (memory == NULL || memory->bytes == 0 || memory->pool.location.type != LOCATION_DEVICE ||
        gpu_of(memory->pool.location.id) < 0)
        return INVALID_VALUE;
    struct graph_node *made =
        graph_add_alloc(graph, (unsigned)gpu_of(memory->pool.location.id), memory->bytes);
    memory->pointer = made->allocation->object.start;
    *node = &made->object;
    return SUCCESS;
}

static CUresult add_free(CUhandle *node, CUhandle handle, const CUhandle *first, size_t count,
                         CUdeviceptr pointer)
{
    struct graph *graph;
    LOCKED;
    TRY(graph_of(handle, first, count, &graph));
    TRY(graph_add_free(graph, object_at(pointer, ALLOCATION)));
    *node = &graph->last->object;
    return SUCCESS;
}

static CUresult add_child(CUhandle *node, CUhandle handle, const CUhandle *first, size_t count,
                          CUhandle child)
{
    struct graph *graph;
    LOCKED;
    TRY(graph_of(handle, first, count, &graph));
    struct graph *inner = object_of(child, GRAPH);
    if (inner == NULL || inner == graph)
        return INVALID_VALUE;
    struct graph_node *made = graph_add(graph, NODE_GRAPH, 0);
    made->child = inner;
    *node = &made->object;
    return SUCCESS;
}

static CUhandle kernel_of(const struct kernel_node *kernel)
{
    return kernel->function != NULL ? kernel->function : kernel->kernel;
}

PUBLIC CUresult cuGraphAddChildGraphNode(CUhandle *node, CUhandle graph, const CUhandle *first,
                                         size_t count, CUhandle child)
{
    ENTER(cuGraphAddChildGraphNode);
    return add_child(node, graph, first, count, child);
}

PUBLIC CUresult cuGraphAddMemAllocNode(CUhandle *node, CUhandle graph, const CUhandle *first,
                                       size_t count, struct memory_node *memory)
{
    ENTER(cuGraphAddMemAllocNode);
    return add_alloc(node, graph, first, count, memory);
}

static CUresult add_any(CUhandle *node, CUhandle graph, const CUhandle *first, size_t count,
                        struct node_parameters *parameters)
{
    if (parameters == NULL || node == NULL)
        return INVALID_VALUE;
    switch (parameters->type) {
    case NODE_KERNEL: return add_kernel(node, graph, first, count, kernel_of(&parameters->kernel));
    case NODE_ALLOC: return add_alloc(node, graph, first, count, &parameters->alloc);
    case NODE_FREE: return add_free(node, graph, first, count, parameters->free);
    case NODE_GRAPH: return add_child(node, graph, first, count, parameters->graph);
    case NODE_MEMCPY:
    case NODE_MEMSET:
    case NODE_HOST:
    case NODE_EMPTY: return add_plain(node, graph, first, count, (enum node_type)parameters->type);
    default: return NOT_SUPPORTED;
    }
}

PUBLIC CUresult cuGraphAddNode(CUhandle *node, CUhandle graph, const CUhandle *first, size_t count,
                               struct node_parameters *parameters)
{
    ENTER(cuGraphAddNode);
    return add_any(node, graph, first, count, parameters);
}

PUBLIC CUresult cuGraphAddNode_v2(CUhandle *node, CUhandle graph, const CUhandle *first,
                                  const void *edges, size_t count, struct node_parameters *parameters)
{
    ENTER(cuGraphAddNode_v2);
    (void)edges;
    return add_any(node, graph, first, count, parameters);
}

PUBLIC CUresult cuGraphAddNode_v3(CUhandle *node, CUhandle graph, const CUhandle *first,
                                  const void *edges, size_t count, struct node_parameters *parameters)
{
    ENTER(cuGraphAddNode_v3);
    (void)edges;
    return add_any(node, graph, first, count, parameters);
}
