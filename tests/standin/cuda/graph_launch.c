/* Graphs: instantiation, upload, launch, and the memory that they allocate. */
#include "capture.h"
#include "graphs.h"
#include "pools.h"
#include "streams.h"

#include <stdlib.h>

enum { AUTO_FREE = 1, USED = 0, USED_PEAK = 1, RESERVED = 2, RESERVED_PEAK = 3, MOST_DEPTH = 8 };

struct step {
    enum node_type type;
    uint64_t ns;
    struct allocation *allocation;
};

struct graph_exec {
    struct object object;
    struct graph *graph;
    int auto_free;
    unsigned count;
    struct step *steps;
};

struct instantiation {
    uint64_t flags;
    CUhandle upload_stream, error_node;
    int result;
};

static struct reserve reserves[MOST_GPUS];

/* The steps of a graph and its child graphs, in order. Returns their number, and fills `steps`
 * unless it is NULL. */
static unsigned flatten(const struct graph *graph, struct step *steps, unsigned depth)
{
    unsigned count = 0;
    for (const struct graph_node *node = graph->first; node != NULL; node = node->next) {
        if (node->type == NODE_GRAPH && depth < MOST_DEPTH)
            count += flatten(node->child, steps != NULL ? steps + count : NULL, depth + 1);
        else if (steps != NULL)
            steps[count++] = (struct step){node->type, node->ns, node->allocation};
        else
            count++;
    }
    return count;
}

static CUresult instantiate(CUhandle *handle, CUhandle from, uint64_t flags, struct graph_exec **made)
{
    LOCKED;
    struct graph *graph = object_of(from, GRAPH);
    if (handle == NULL || graph == NULL)
        return INVALID_VALUE;
    unsigned count = flatten(graph, NULL, 0);
    struct step *steps = calloc(count + 1, sizeof *steps);
    flatten(graph, steps, 0);
    for (unsigned i = 0; i < count; i++)
        if (steps[i].type == NODE_ALLOC && graph->instances > 0) {
            free(steps);
            return NOT_SUPPORTED; /* the other graph uses its addresses */
        }
    struct graph_exec *exec = object_new(sizeof *exec, GRAPH_EXEC, 0, 0, 0, NULL);
    exec->graph = graph;
    exec->auto_free = (flags & AUTO_FREE) != 0;
    exec->count = count;
    exec->steps = steps;
    graph->instances++;
    *handle = &exec->object;
    *made = exec;
    return SUCCESS;
}

PUBLIC CUresult cuGraphInstantiate(CUhandle *exec, CUhandle graph, CUhandle *error, char *log,
                                   size_t length)
{
    struct graph_exec *made;
    ENTER(cuGraphInstantiate);
    (void)error, (void)log, (void)length;
    return instantiate(exec, graph, 0, &made);
}

PUBLIC CUresult cuGraphInstantiate_v2(CUhandle *exec, CUhandle graph, CUhandle *error, char *log,
                                      size_t length)
{
    struct graph_exec *made;
    ENTER(cuGraphInstantiate_v2);
    (void)error, (void)log, (void)length;
    return instantiate(exec, graph, 0, &made);
}

PUBLIC CUresult cuGraphInstantiateWithFlags(CUhandle *exec, CUhandle graph, unsigned long long flags)
{
    struct graph_exec *made;
    ENTER(cuGraphInstantiateWithFlags);
    return instantiate(exec, graph, flags, &made);
}

PUBLIC CUresult cuGraphExecDestroy(CUhandle handle)
{
    ENTER(cuGraphExecDestroy);
    LOCKED;
    struct graph_exec *exec = object_of(handle, GRAPH_EXEC);
    if (exec == NULL)
        return INVALID_VALUE;
    exec->graph->instances--;
    object_destroy(&exec->object);
    return SUCCESS;
}

/* Run the memory nodes in order: `most` gets the maximum of held bytes, `left` the bytes that
 * stay. */
static void run_memory(const struct graph_exec *exec, uint64_t *most, int64_t *left)
{
    int64_t held = 0, peak = 0;
    for (unsigned i = 0; i < exec->count; i++) {
        if (exec->steps[i].type == NODE_ALLOC)
            held += (int64_t)exec->steps[i].allocation->object.length;
        else if (exec->steps[i].type == NODE_FREE)
            held -= (int64_t)exec->steps[i].allocation->object.length;
        peak = held > peak ? held : peak;
    }
    *most = (uint64_t)peak;
    *left = held;
}

static int has_memory(const struct graph_exec *exec, unsigned *gpu)
{
    for (unsigned i = 0; i < exec->count; i++)
        if (exec->steps[i].type == NODE_ALLOC) {
            *gpu = exec->steps[i].allocation->object.gpu;
            return 1;
        }
    return 0;
}

/* Reserve the maximum that a launch needs. */
static CUresult reserve_for(const struct graph_exec *exec, unsigned gpu)
{
    uint64_t most;
    int64_t left;
    run_memory(exec, &most, &left);
    if (reserve_use(&reserves[gpu], gpu, HELD_GRAPH, most, 0) != 0)
        return OUT_OF_MEMORY;
    reserves[gpu].used -= most;
    return SUCCESS;
}

CUresult graph_memory_free(struct allocation *allocation)
{
    if (!allocation->live)
        return INVALID_VALUE;
    allocation->live = 0;
    reserves[allocation->object.gpu].used -= allocation->object.length;
    return SUCCESS;
}

void graph_memory_reset(unsigned gpu)
{
    for (struct object *one = objects_newest(); one != NULL; one = one->older) {
        struct allocation *allocation = (struct allocation *)one;
        if (one->type == ALLOCATION && one->gpu == gpu && allocation->of_graph)
            allocation->live = 0;
    }
    reserves[gpu].used = 0;
    reserve_trim(&reserves[gpu], gpu, HELD_GRAPH, 0);
}

/* Memory of earlier launches must have been freed, or is freed now if the graph says so. */
static CUresult memory_for_launch(struct graph_exec *exec)
{
    unsigned gpu = 0;
    if (!has_memory(exec, &gpu))
        return SUCCESS;
    for (unsigned i = 0; i < exec->count; i++) {
        struct allocation *allocation = exec->steps[i].allocation;
        if (exec->steps[i].type != NODE_ALLOC || !allocation->live)
            continue;
        if (!exec->auto_free)
            return INVALID_VALUE;
        graph_memory_free(allocation);
    }
    return reserve_for(exec, gpu);
}

static CUresult live_after_launch(const struct graph_exec *exec)
{
    for (unsigned i = 0; i < exec->count; i++) {
        struct allocation *allocation = exec->steps[i].allocation;
        if (exec->steps[i].type == NODE_ALLOC) {
            allocation->live = 1;
            reserves[allocation->object.gpu].used += allocation->object.length;
        } else if (exec->steps[i].type == NODE_FREE) {
            TRY(graph_memory_free(allocation));
        }
    }
    return SUCCESS;
}

static CUresult upload(CUhandle handle, CUhandle stream, int per_thread)
{
    struct stream_place place;
    unsigned gpu;
    LOCKED;
    TRY(stream_of(stream, per_thread, &place));
    const struct graph_exec *exec = object_of(handle, GRAPH_EXEC);
    if (exec == NULL)
        return INVALID_VALUE;
    return has_memory(exec, &gpu) ? reserve_for(exec, gpu) : SUCCESS;
}

static CUresult launch(CUhandle handle, CUhandle stream, int per_thread)
{
    struct stream_place place;
    uint64_t ns = 0;
    {
        LOCKED;
        TRY(stream_of(stream, per_thread, &place));
        struct graph_exec *exec = object_of(handle, GRAPH_EXEC);
        if (exec == NULL)
            return INVALID_VALUE;
        int captured;
        TRY(capture_graph(&place, exec->graph, &captured));
        if (captured)
            return SUCCESS;
        TRY(memory_for_launch(exec));
        TRY(live_after_launch(exec));
        for (unsigned i = 0; i < exec->count; i++)
            ns += exec->steps[i].ns;
    }
    __atomic_add_fetch(&ledger_own->gpus[place.gpu].launches, 1, __ATOMIC_RELAXED);
    stream_push(&place, ns);
    return SUCCESS;
}

static CUresult instantiate_with(CUhandle *exec, CUhandle graph, struct instantiation *with,
                                 int per_thread)
{
    struct graph_exec *made;
    if (with == NULL)
        return INVALID_VALUE;
    TRY(instantiate(exec, graph, with->flags, &made));
    with->error_node = NULL;
    with->result = 0;
    return with->flags & 2 ? upload(*exec, with->upload_stream, per_thread) : SUCCESS;
}

BOTH(cuGraphInstantiateWithParams,
     (CUhandle *exec, CUhandle graph, struct instantiation *with),
     instantiate_with(exec, graph, with, per_thread))
BOTH(cuGraphUpload, (CUhandle exec, CUhandle stream), upload(exec, stream, per_thread))
BOTH(cuGraphLaunch, (CUhandle exec, CUhandle stream), launch(exec, stream, per_thread))

PUBLIC CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int attribute, uint64_t *value)
{
    ENTER(cuDeviceGetGraphMemAttribute);
    GPU_OF(device);
    LOCKED;
    const uint64_t values[] = {reserves[gpu].used, reserves[gpu].used_peak, reserves[gpu].reserved,
                               reserves[gpu].reserved_peak};
    if (value == NULL || attribute < USED || attribute > RESERVED_PEAK)
        return INVALID_VALUE;
    *value = values[attribute];
    return SUCCESS;
}

PUBLIC CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    ENTER(cuDeviceGraphMemTrim);
    GPU_OF(device);
    LOCKED;
    reserve_trim(&reserves[gpu], gpu, HELD_GRAPH, 0);
    return SUCCESS;
}
