/*
 * Memory that graphs allocate. The driver takes it when a graph is first uploaded or launched, for each
 * device, and keeps it for the next ones. Until then the shim knows what the nodes ask for; after that
 * it counts what the driver says it reserves.
 */
#include "devices.h"
#include "group.h"
#include "hooks.h"
#include "launches.h"
#include "process.h"

static void note_node(const struct cu_alloc_node *node)
{
    int gpu = gpu_of_device(node->pool.location.id);

    if (node->pool.location.type != CU_ON_DEVICE || gpu == GROUP_NO_GPU)
        return;
    atomic_fetch_add(&process->graph_pending[gpu], node->bytes);
    atomic_store(&process->graph_allocates, true);
}

int on_node_alloc(const struct hook *hook, PARAMS_node_alloc)
{
    int result = REAL(hook, node_alloc)(ARGS_node_alloc);

    if (result == CU_SUCCESS && group_join())
        note_node(parameters);
    return result;
}

int on_node(const struct hook *hook, PARAMS_node)
{
    int result = REAL(hook, node)(ARGS_node);

    if (result == CU_SUCCESS && parameters->type == CU_NODE_ALLOCATES && group_join())
        note_node(&parameters->alloc);
    return result;
}

int on_node_v2(const struct hook *hook, PARAMS_node_v2)
{
    int result = REAL(hook, node_v2)(ARGS_node_v2);

    if (result == CU_SUCCESS && parameters->type == CU_NODE_ALLOCATES && group_join())
        note_node(&parameters->alloc);
    return result;
}

/* Count what the driver reserves for graphs on a device. `expected` of it was counted beside it. */
static void settle_graphs(int device, int gpu, uint64_t expected)
{
    uint64_t reserved = 0;

    pthread_mutex_lock(&process->lock);
    uint64_t counted = process->graph_bytes[gpu] + expected;

    if (!driver.cuDeviceGetGraphMemAttribute ||
        driver.cuDeviceGetGraphMemAttribute(device, CU_GRAPH_RESERVED, &reserved) != CU_SUCCESS)
        reserved = counted;
    if (reserved != counted)
        group_replace(gpu, counted, reserved);
    process->graph_bytes[gpu] = reserved;
    pthread_mutex_unlock(&process->lock);
}

bool trim_graphs(int gpu)
{
    bool trimmed = false;

    for (int device = 0; device < ORDINALS; device++)
        if (atomic_load(&process->ordinal[device].gpu) == gpu + 2 && process->graph_bytes[gpu] > 0 &&
            driver.cuDeviceGraphMemTrim) {
            driver.cuDeviceGraphMemTrim(device);
            settle_graphs(device, gpu, 0);
            trimmed = true;
        }
    return trimmed;
}

/* Before an upload or launch: count what the graphs' nodes ask for. False: it does not fit. */
static bool charge_nodes(uint64_t expected[ORDINALS])
{
    for (int device = 0; device < ORDINALS; device++) {
        int gpu = atomic_load(&process->ordinal[device].gpu) - 2;

        expected[device] = 0;
        if (gpu < 0)
            continue;
        uint64_t pending = atomic_exchange(&process->graph_pending[gpu], 0);

        if (pending > 0 && !charge(gpu, pending)) {
            atomic_fetch_add(&process->graph_pending[gpu], pending);
            for (int earlier = 0; earlier < device; earlier++)
                if (expected[earlier] > 0) {
                    gpu = atomic_load(&process->ordinal[earlier].gpu) - 2;
                    atomic_fetch_add(&process->graph_pending[gpu], expected[earlier]);
                    group_release(gpu, expected[earlier]);
                }
            return false;
        }
        expected[device] = pending;
    }
    return true;
}

/* After it: a launch that failed may have taken memory, too. */
static void settle_nodes(const uint64_t expected[ORDINALS])
{
    for (int device = 0; device < ORDINALS; device++) {
        int gpu = atomic_load(&process->ordinal[device].gpu) - 2;

        if (gpu >= 0)
            settle_graphs(device, gpu, expected[device]);
    }
}

static int with_memory(const struct hook *hook, void *graph, void *stream)
{
    uint64_t expected[ORDINALS];

    if (!process || !atomic_load_explicit(&process->graph_allocates, memory_order_relaxed) ||
        is_capturing(stream_of(hook, stream)))
        return REAL(hook, graph)(ARGS_graph);
    if (!charge_nodes(expected))
        return CU_OUT_OF_MEMORY;
    int result = REAL(hook, graph)(ARGS_graph);
    int mode = begin_own_calls();

    settle_nodes(expected);
    end_own_calls(mode);
    return result;
}

int on_graph_upload(const struct hook *hook, PARAMS_graph)
{
    return with_memory(hook, graph, stream);
}

int on_graph_launch(const struct hook *hook, PARAMS_graph)
{
    struct gate_launch launch;

    before_launch(&launch, hook, GATE_GRAPH, graph, stream);
    return after_launch(&launch, with_memory(hook, graph, stream));
}

int on_graph_trim(const struct hook *hook, PARAMS_device)
{
    int result = REAL(hook, device)(ARGS_device);
    int gpu = gpu_of_device(device);

    if (result == CU_SUCCESS && gpu >= 0 && group_join())
        settle_graphs(device, gpu, 0);
    return result;
}
