/*
 * Memory that graphs allocate. The driver takes it when a graph is first uploaded or launched, and keeps
 * it on the device for all graphs of the process. So the shim adds up what the nodes of a graph ask for;
 * before a launch it counts what the driver may have to take for them, and after it what the driver says.
 */
#include "devices.h"
#include "group.h"
#include "hooks.h"
#include "launches.h"
#include "old_glibc.h"
#include "process.h"

/* A graph, or what was instantiated of it, and a GPU: handles are aligned, so their low bits are 0. */
static uint64_t key_of(const void *graph, int gpu)
{
    return (uint64_t)(uintptr_t)graph << 4 | (uint64_t)gpu;
}

/* Whether any graph of the process has a node that allocates. */
static bool graphs_allocate(void)
{
    return process && atomic_load_explicit(&process->graph_allocates, memory_order_relaxed);
}

static bool more(struct entry *entry, void *bytes)
{
    entry->bytes += *(uint64_t *)bytes;
    return true;
}

static void add_bytes(enum table_kind kind, const void *graph, int gpu, uint64_t bytes)
{
    uint64_t key = key_of(graph, gpu);

    if (gpu < 0 || bytes == 0)
        return;
    atomic_store(&process->graph_allocates, true);
    if (!table_change(kind, key, more, &bytes))
        table_put(&(struct entry){.kind = (uint8_t)kind, .key = key, .bytes = bytes,
                                  .gpu = (int8_t)gpu});
}

/* What the nodes of a graph ask for is asked for by another one, too. */
static void add_graph(enum table_kind kind, const void *to, const void *from)
{
    struct entry entry;

    if (!graphs_allocate())
        return;
    for (int gpu = 0; gpu < (int)group_gpus(); gpu++)
        if (table_get(TABLE_GRAPH, key_of(from, gpu), &entry))
            add_bytes(kind, to, gpu, entry.bytes);
}

static void forget(enum table_kind kind, const void *graph)
{
    struct entry entry;

    for (int gpu = 0; process && gpu < (int)group_gpus(); gpu++)
        table_take(kind, key_of(graph, gpu), &entry);
}

/* ---- what the driver takes for them ---------------------------------------------------------- */

static uint64_t attribute(int device, int which)
{
    uint64_t bytes = 0;

    if (!driver.cuDeviceGetGraphMemAttribute ||
        driver.cuDeviceGetGraphMemAttribute(device, which, &bytes) != CU_SUCCESS)
        return UINT64_MAX;
    return bytes;
}

void settle_graphs(int device, int gpu, uint64_t expected)
{
    pthread_mutex_lock(&process->lock);
    uint64_t counted = process->graph_bytes[gpu] + process->graph_growing[gpu];
    uint64_t growing = process->graph_growing[gpu] - expected;
    uint64_t reserved = attribute(device, CU_GRAPH_RESERVED);
    uint64_t now = counted_now(counted, growing, reserved == UINT64_MAX ? counted - growing : reserved);

    if (now != counted)
        group_replace(gpu, counted, now);
    process->graph_bytes[gpu] = now - growing;
    process->graph_growing[gpu] = growing;
    pthread_mutex_unlock(&process->lock);
}

/* Under `graph_lock`. */
static void trim(int gpu)
{
    for (int device = 0; device < ORDINALS; device++)
        if (atomic_load(&process->ordinal[device].gpu) == gpu + 2 && process->graph_bytes[gpu] > 0 &&
            driver.cuDeviceGraphMemTrim) {
            driver.cuDeviceGraphMemTrim(device);
            settle_graphs(device, gpu, 0);
        }
}

void trim_graphs(int gpu)
{
    pthread_mutex_lock(&process->graph_lock);
    trim(gpu);
    pthread_mutex_unlock(&process->graph_lock);
}

/* What a graph's upload or launch may make the driver reserve beyond what it has. */
static uint64_t growth(int device, int gpu, enum table_kind kind, const void *graph)
{
    struct entry entry;

    if (!table_get(kind, key_of(graph, gpu), &entry))
        return 0;
    uint64_t used = attribute(device, CU_GRAPH_USED), reserved = attribute(device, CU_GRAPH_RESERVED);
    uint64_t wanted = used == UINT64_MAX ? UINT64_MAX : round_up(used + entry.bytes, granule_of(gpu));

    if (reserved == UINT64_MAX)
        return round_up(entry.bytes, granule_of(gpu));
    return wanted > reserved ? wanted - reserved : 0;
}

static void add_growing(int gpu, uint64_t bytes)
{
    pthread_mutex_lock(&process->lock);
    process->graph_growing[gpu] += bytes;
    pthread_mutex_unlock(&process->lock);
}

/* After it, or in place of it. */
static void settle_all(const uint64_t expected[ORDINALS])
{
    int mode = begin_own_calls();

    for (int device = 0; device < ORDINALS; device++) {
        int gpu = atomic_load(&process->ordinal[device].gpu) - 2;

        if (gpu >= 0)
            settle_graphs(device, gpu, expected[device]);
    }
    end_own_calls(mode);
    pthread_mutex_unlock(&process->graph_lock);
}

/* Count what a graph may need on a device. What is given up for it may be its own: so what it needs
   is asked for once more then. */
static bool charge_growth(int device, int gpu, enum table_kind kind, const void *graph, uint64_t *bytes)
{
    *bytes = growth(device, gpu, kind, graph);
    if (*bytes == 0 || group_charge(gpu, *bytes))
        return true;
    int mode = begin_own_calls();

    trim_pools(gpu);
    trim(gpu);
    end_own_calls(mode);
    *bytes = growth(device, gpu, kind, graph);
    if (*bytes == 0 || group_charge(gpu, *bytes))
        return true;
    *bytes = 0;
    group_denied(gpu);
    return false;
}

static bool allocates(enum table_kind kind, const void *graph)
{
    struct entry entry;

    for (int gpu = 0; graphs_allocate() && gpu < (int)group_gpus(); gpu++)
        if (table_get(kind, key_of(graph, gpu), &entry))
            return true;
    return false;
}

/* Before an upload or launch: count what it may need. False: it does not fit. Else `graph_lock` is taken
   until settle_all, so that no other thread takes what is there for it, or trims it. */
static bool charge_all(enum table_kind kind, const void *graph, uint64_t expected[ORDINALS])
{
    for (int device = 0; device < ORDINALS; device++)
        expected[device] = 0;
    pthread_mutex_lock(&process->graph_lock);
    for (int device = 0; device < ORDINALS; device++) {
        int gpu = atomic_load(&process->ordinal[device].gpu) - 2;

        if (gpu >= 0 && !charge_growth(device, gpu, kind, graph, &expected[device])) {
            settle_all(expected);
            return false;
        }
        if (expected[device] > 0)
            add_growing(gpu, expected[device]);
    }
    return true;
}

/* ---- nodes and graphs ------------------------------------------------------------------------ */

void note_captured(void *stream, int gpu, uint64_t bytes)
{
    int status = 0;
    void *graph = NULL;

    if (driver.cuStreamGetCaptureInfo_v2)
        driver.cuStreamGetCaptureInfo_v2(stream, &status, NULL, &graph, NULL, NULL);
    else if (driver.cuStreamGetCaptureInfo_v3)
        driver.cuStreamGetCaptureInfo_v3(stream, &status, NULL, &graph, NULL, NULL, NULL);
    add_bytes(TABLE_GRAPH, graph, gpu, bytes);
}

static void note_node(void *graph, const struct cu_alloc_node *node)
{
    if (node->pool.location.type == CU_ON_DEVICE && group_join())
        add_bytes(TABLE_GRAPH, graph, gpu_of_device(node->pool.location.id), node->bytes);
}

static void note_any(void *graph, const struct cu_node *node)
{
    if (node->type == CU_NODE_ALLOCATES)
        note_node(graph, &node->alloc);
    else if (node->type == CU_NODE_IS_GRAPH)
        add_graph(TABLE_GRAPH, graph, node->child);
}

int on_node_alloc(const struct hook *hook, PARAMS_node_alloc)
{
    int result = REAL(hook, node_alloc)(ARGS_node_alloc);

    if (result == CU_SUCCESS)
        note_node(graph, parameters);
    return result;
}

int on_node(const struct hook *hook, PARAMS_node)
{
    int result = REAL(hook, node)(ARGS_node);

    if (result == CU_SUCCESS)
        note_any(graph, parameters);
    return result;
}

int on_node_v2(const struct hook *hook, PARAMS_node_v2)
{
    int result = REAL(hook, node_v2)(ARGS_node_v2);

    if (result == CU_SUCCESS)
        note_any(graph, parameters);
    return result;
}

int on_child(const struct hook *hook, PARAMS_child)
{
    int result = REAL(hook, child)(ARGS_child);

    if (result == CU_SUCCESS)
        add_graph(TABLE_GRAPH, graph, child);
    return result;
}

int on_instantiate(const struct hook *hook, PARAMS_instantiate)
{
    int result = REAL(hook, instantiate)(ARGS_instantiate);

    if (result == CU_SUCCESS)
        add_graph(TABLE_EXEC, *exec, graph);
    return result;
}

int on_instantiate_flags(const struct hook *hook, PARAMS_instantiate_flags)
{
    int result = REAL(hook, instantiate_flags)(ARGS_instantiate_flags);

    if (result == CU_SUCCESS)
        add_graph(TABLE_EXEC, *exec, graph);
    return result;
}

/* With the graph's upload, which takes memory for it. */
int on_instantiate_with(const struct hook *hook, PARAMS_instantiate_with)
{
    bool uploads = parameters && parameters->flags & CU_INSTANTIATE_UPLOADS &&
                   allocates(TABLE_GRAPH, graph);
    uint64_t expected[ORDINALS];

    if (uploads && !charge_all(TABLE_GRAPH, graph, expected))
        return CU_OUT_OF_MEMORY;
    int result = REAL(hook, instantiate_with)(ARGS_instantiate_with);

    if (uploads)
        settle_all(expected);
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

/* ---- launches -------------------------------------------------------------------------------- */

/* A launch that was captured: what the graph asks for is asked for by the one that is captured. */
static void note_launch(void *stream, const void *graph)
{
    struct entry entry;

    for (int gpu = 0; gpu < (int)group_gpus(); gpu++)
        if (table_get(TABLE_EXEC, key_of(graph, gpu), &entry))
            note_captured(stream, gpu, entry.bytes);
}

static int with_memory(const struct hook *hook, void *graph, void *stream, struct gate_launch *launch)
{
    uint64_t expected[ORDINALS];

    if (!allocates(TABLE_EXEC, graph))
        return REAL(hook, graph)(ARGS_graph);
    if (is_capturing(stream_of(hook, stream))) {
        int captured = REAL(hook, graph)(ARGS_graph);

        if (captured == CU_SUCCESS)
            note_launch(stream_of(hook, stream), graph);
        return captured;
    }
    if (!charge_all(TABLE_EXEC, graph, expected))
        return CU_OUT_OF_MEMORY;
    if (launch && launch->start) /* from here on it is timed, not while it waited for the lock */
        driver.cuEventRecord(launch->start, launch->stream);
    int result = REAL(hook, graph)(ARGS_graph);

    settle_all(expected);
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
    return after_launch(&launch, with_memory(hook, graph, stream, &launch));
}

int on_graph_trim(const struct hook *hook, PARAMS_device)
{
    if (!group_join())
        return REAL(hook, device)(ARGS_device);
    pthread_mutex_lock(&process->graph_lock);
    int result = REAL(hook, device)(ARGS_device);
    int gpu = gpu_of_device(device);

    if (result == CU_SUCCESS && gpu >= 0)
        settle_graphs(device, gpu, 0);
    pthread_mutex_unlock(&process->graph_lock);
    return result;
}
