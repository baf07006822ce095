/* Memory that graphs allocate. The driver reserves this memory when a graph is first uploaded or
   launched, and keeps it for all graphs of the process. Before a launch the shim counts the possible
   growth by the allocations of the graph's nodes. After the launch it counts the driver's figure. */
#include "devices.h"
#include "gate.h"
#include "group.h"
#include "hooks.h"
#include "old_glibc.h"
#include "process.h"

static bool graphs_allocate(void)
{
    return process && atomic_load_explicit(&process->graph_allocates, memory_order_relaxed);
}

static bool more(struct entry *entry, void *bytes)
{
    entry->bytes += *(uint64_t *)bytes;
    return true;
}

static void add_bytes(enum table_kind kind, const void *graph, uint64_t bytes)
{
    if (bytes == 0)
        return;
    atomic_store(&process->graph_allocates, true);
    if (!table_change(kind, (uintptr_t)graph, more, &bytes))
        table_put(&(struct entry){.kind = (uint8_t)kind, .key = (uintptr_t)graph, .bytes = bytes});
}

/* The bytes that a graph's nodes allocate. False: they allocate nothing. */
static bool asks(enum table_kind kind, const void *graph, struct entry *entry)
{
    return graphs_allocate() && table_get(kind, (uintptr_t)graph, entry);
}

static void add_graph(enum table_kind kind, const void *to, const void *from)
{
    struct entry entry;

    if (asks(TABLE_GRAPH, from, &entry))
        add_bytes(kind, to, entry.bytes);
}

static void forget(enum table_kind kind, const void *graph)
{
    struct entry entry;

    if (graphs_allocate())
        table_take(kind, (uintptr_t)graph, &entry);
}

static uint64_t attribute(int which)
{
    uint64_t bytes = 0;

    if (!driver.cuDeviceGetGraphMemAttribute ||
        driver.cuDeviceGetGraphMemAttribute(our_device(), which, &bytes) != CU_SUCCESS)
        return UINT64_MAX;
    return bytes;
}

void settle_graphs(uint64_t expected)
{
    pthread_mutex_lock(&process->lock);
    uint64_t counted = process->graph_bytes + process->graph_growing;
    uint64_t growing = process->graph_growing - expected;
    uint64_t reserved = attribute(CU_GRAPH_RESERVED);
    uint64_t now = counted_now(counted, growing, reserved == UINT64_MAX ? counted - growing : reserved);

    if (now != counted)
        group_replace(counted, now);
    process->graph_bytes = now - growing;
    process->graph_growing = growing;
    pthread_mutex_unlock(&process->lock);
}

/* The caller has `graph_lock`. */
static void trim(void)
{
    if (process->graph_bytes > 0 && driver.cuDeviceGraphMemTrim) {
        driver.cuDeviceGraphMemTrim(our_device());
        settle_graphs(0);
    }
}

void trim_graphs(void)
{
    pthread_mutex_lock(&process->graph_lock);
    trim();
    pthread_mutex_unlock(&process->graph_lock);
}

/* The possible growth of the reservation in a graph's upload or launch. */
static uint64_t growth(enum table_kind kind, const void *graph)
{
    struct entry entry;

    if (!asks(kind, graph, &entry))
        return 0;
    uint64_t used = attribute(CU_GRAPH_USED), reserved = attribute(CU_GRAPH_RESERVED);
    uint64_t needed = used == UINT64_MAX ? UINT64_MAX : round_up(used + entry.bytes, granule());

    if (reserved == UINT64_MAX)
        return round_up(entry.bytes, granule());
    return needed > reserved ? needed - reserved : 0;
}

/* After an upload or launch, or instead of it. */
static void finish(uint64_t expected)
{
    int mode = begin_own_calls();

    settle_graphs(expected);
    end_own_calls(mode);
    pthread_mutex_unlock(&process->graph_lock);
}

/* Trimming may release the graph's own memory, so the growth is computed again. Returns true with
   `graph_lock` held, so that no other thread uses or trims the memory before `finish`. */
static bool begin(enum table_kind kind, const void *graph, uint64_t *expected)
{
    pthread_mutex_lock(&process->graph_lock);
    *expected = growth(kind, graph);
    bool done = *expected == 0 || group_charge(*expected);

    if (!done) {
        int mode = begin_own_calls();

        trim_pools();
        trim();
        end_own_calls(mode);
        *expected = growth(kind, graph);
        done = *expected == 0 || group_charge(*expected);
    }
    if (!done) {
        group_denied();
        finish(0);
        return false;
    }
    pthread_mutex_lock(&process->lock);
    process->graph_growing += *expected;
    pthread_mutex_unlock(&process->lock);
    return true;
}

void note_captured(void *stream, uint64_t bytes)
{
    int status = 0;
    void *graph = NULL;

    if (driver.cuStreamGetCaptureInfo_v2)
        driver.cuStreamGetCaptureInfo_v2(stream, &status, NULL, &graph, NULL, NULL);
    else if (driver.cuStreamGetCaptureInfo_v3)
        driver.cuStreamGetCaptureInfo_v3(stream, &status, NULL, &graph, NULL, NULL, NULL);
    add_bytes(TABLE_GRAPH, graph, bytes);
}

static void note_node(void *graph, const struct cu_alloc_node *node)
{
    if (place_of_location(&node->pool.location) == OURS)
        add_bytes(TABLE_GRAPH, graph, node->bytes);
}

static void note_any(void *graph, const struct cu_node *node)
{
    if (node->type == CU_NODE_ALLOCATES)
        note_node(graph, &node->alloc);
    else if (node->type == CU_NODE_IS_GRAPH)
        add_graph(TABLE_GRAPH, graph, node->child);
}

NOTING(on_node_alloc, node_alloc, note_node(graph, parameters))
NOTING(on_node, node, note_any(graph, parameters))
NOTING(on_node_v2, node_v2, note_any(graph, parameters))
NOTING(on_child, child, add_graph(TABLE_GRAPH, graph, child))
NOTING(on_instantiate, instantiate, add_graph(TABLE_EXEC, *exec, graph))
NOTING(on_instantiate_flags, instantiate_flags, add_graph(TABLE_EXEC, *exec, graph))

/* An instantiation may upload the graph, which reserves its memory. */
int on_instantiate_with(const struct hook *hook, PARAMS_instantiate_with)
{
    struct entry entry;
    uint64_t expected;
    bool uploads = parameters && parameters->flags & CU_INSTANTIATE_UPLOADS &&
                   asks(TABLE_GRAPH, graph, &entry);

    if (uploads && !begin(TABLE_GRAPH, graph, &expected))
        return CU_OUT_OF_MEMORY;
    int result = REAL(hook, instantiate_with)(ARGS_instantiate_with);

    if (uploads)
        finish(expected);
    if (result == CU_SUCCESS)
        add_graph(TABLE_EXEC, *exec, graph);
    return result;
}

int on_graph_destroy(const struct hook *hook, PARAMS_handle)
{
    forget(TABLE_GRAPH, handle);
    return REAL(hook, handle)(ARGS_handle);
}

int on_exec_destroy(const struct hook *hook, PARAMS_handle)
{
    forget(TABLE_EXEC, handle);
    return REAL(hook, handle)(ARGS_handle);
}

static int with_memory(const struct hook *hook, void *graph, void *stream, struct gate_launch *launch)
{
    struct entry entry;
    uint64_t expected;

    if (!asks(TABLE_EXEC, graph, &entry))
        return REAL(hook, graph)(ARGS_graph);
    if (is_capturing(stream_of(hook, stream))) {
        int captured = REAL(hook, graph)(ARGS_graph);

        /* The graph becomes a part of the captured graph. */
        if (captured == CU_SUCCESS)
            note_captured(stream_of(hook, stream), entry.bytes);
        return captured;
    }
    if (!begin(TABLE_EXEC, graph, &expected))
        return CU_OUT_OF_MEMORY;
    if (launch && launch->start) /* time from here, without the wait for the lock */
        driver.cuEventRecord(launch->start, launch->stream);
    int result = REAL(hook, graph)(ARGS_graph);

    finish(expected);
    return result;
}

int on_graph_upload(const struct hook *hook, PARAMS_graph)
{
    return with_memory(hook, graph, stream, NULL);
}

int on_graph_launch(const struct hook *hook, PARAMS_graph)
{
    struct gate_launch launch;

    before_launch(&launch, hook, GATE_GRAPH, graph, stream);
    return gate_after(&launch, with_memory(hook, graph, stream, &launch));
}

int on_graph_trim(const struct hook *hook, PARAMS_device)
{
    if (!group_join())
        return REAL(hook, device)(ARGS_device);
    pthread_mutex_lock(&process->graph_lock);
    int result = REAL(hook, device)(ARGS_device);

    if (result == CU_SUCCESS && place_of_device(device) == OURS)
        settle_graphs(0);
    pthread_mutex_unlock(&process->graph_lock);
    return result;
}
