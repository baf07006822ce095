/*
 * Contexts: each device's first one of a process takes memory that no call tells (CUDA's own, and the
 * code of modules). The agent measures it; until then the group's limit has a number for it. A context
 * that goes takes its allocations with it.
 */
#include "devices.h"
#include "driver.h"
#include "gate.h"
#include "group.h"
#include "hooks.h"
#include "process.h"

/* Count a device's context, if it is the first one. False: it does not fit. */
static bool add_context(int gpu)
{
    bool done = true;

    if (gpu < 0)
        return false;
    pthread_mutex_lock(&process->lock);
    if (process->contexts[gpu] == 0)
        done = group_charge_context(gpu);
    process->contexts[gpu] += done;
    pthread_mutex_unlock(&process->lock);
    if (!done)
        group_denied(gpu);
    return done;
}

enum { NO_GPU = -1 };

struct dropping {
    uint64_t context;
    int gpu; /* all of this one, if not NO_GPU */
    uint64_t bytes[PF_GPUS];
};

static bool drop(struct entry *entry, void *with)
{
    struct dropping *dropping = with;

    if (entry->gpu < 0 || (entry->owner != dropping->context && entry->gpu != dropping->gpu))
        return true;
    dropping->bytes[entry->gpu] += entry->bytes;
    return false;
}

/* Count no more what belonged to a context that is gone; or all of a GPU that has none any more, also
   what was allocated in a green one, which no call says. */
static void drop_allocations(void *context, int gpu_without)
{
    struct dropping dropping = {.context = (uintptr_t)context, .gpu = gpu_without};

    table_visit(TABLE_POINTER, drop, &dropping);
    table_visit(TABLE_ARRAY, drop, &dropping);
    for (int gpu = 0; gpu < PF_GPUS; gpu++)
        group_release(gpu, dropping.bytes[gpu]);
}

static void remove_context(int gpu)
{
    if (gpu < 0)
        return;
    pthread_mutex_lock(&process->lock);
    if (process->contexts[gpu] > 0 && --process->contexts[gpu] == 0) {
        group_release_context(gpu);
        drop_allocations(NULL, gpu);
    }
    pthread_mutex_unlock(&process->lock);
}

static int begin(int device)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    return add_context(gpu_of_device(device)) ? CU_SUCCESS : CU_OUT_OF_MEMORY;
}

static int finish(int result, int device, void *const *context)
{
    int gpu = gpu_of_device(device);

    if (result != CU_SUCCESS)
        remove_context(gpu);
    else if (context)
        table_put(&(struct entry){.kind = TABLE_CONTEXT, .key = (uintptr_t)*context,
                                  .gpu = (int8_t)gpu});
    return result;
}

int on_context(const struct hook *hook, PARAMS_context)
{
    int result = begin(device);

    return result ? result : finish(REAL(hook, context)(ARGS_context), device, context);
}

int on_context_v3(const struct hook *hook, PARAMS_context_v3)
{
    int result = begin(device);

    return result ? result : finish(REAL(hook, context_v3)(ARGS_context_v3), device, context);
}

int on_context_v4(const struct hook *hook, PARAMS_context_v4)
{
    int result = begin(device);

    return result ? result : finish(REAL(hook, context_v4)(ARGS_context_v4), device, context);
}

int on_context_destroy(const struct hook *hook, PARAMS_handle)
{
    struct entry context;
    bool known = group_join() && table_take(TABLE_CONTEXT, (uintptr_t)handle, &context);

    gate_forget_events();
    int result = REAL(hook, handle)(ARGS_handle);

    if (known && result != CU_SUCCESS) {
        table_put(&context);
    } else if (known) {
        drop_allocations(handle, NO_GPU);
        remove_context(context.gpu);
    }
    return result;
}

/* ---- primary contexts: one for each device and process, which libraries share ---------------- */

static bool is_device(int device)
{
    return device >= 0 && device < ORDINALS;
}

/* After a call that retains a device's primary context, for which one was counted. It is counted once,
   however often it is retained. */
static void count_primary(int device, bool retained, void *context)
{
    struct ordinal *ordinal = &process->ordinal[device];

    pthread_mutex_lock(&process->lock);
    bool first = retained && ordinal->primary++ == 0;

    if (retained && context)
        ordinal->primary_context = context;
    pthread_mutex_unlock(&process->lock);
    if (!first)
        remove_context(gpu_of_device(device));
}

int on_primary_retain(const struct hook *hook, PARAMS_primary)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    if (!is_device(device))
        return REAL(hook, primary)(ARGS_primary);
    int result = begin(device);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, primary)(ARGS_primary);
    count_primary(device, result == CU_SUCCESS, result == CU_SUCCESS ? *context : NULL);
    return result;
}

static void primary_gone(int device, void *context)
{
    int gpu = gpu_of_device(device);

    if (context)
        drop_allocations(context, NO_GPU);
    remove_context(gpu);
    if (gpu < 0)
        return;
    settle_pools(gpu);
    if (process->graph_bytes[gpu] > 0)
        settle_graphs(device, gpu, 0);
}

/* After a call that releases a device's primary context; or all that retained it. */
static void release_primary(int device, bool all)
{
    struct ordinal *ordinal = &process->ordinal[device];
    unsigned flags;
    int active = 0;

    pthread_mutex_lock(&process->lock);
    bool known = !all && driver.cuDevicePrimaryCtxGetState &&
                 driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CU_SUCCESS;
    bool gone = ordinal->primary > 0 && (known ? !active : all || ordinal->primary == 1);
    void *context = ordinal->primary_context;

    if (gone) {
        ordinal->primary = 0;
        ordinal->primary_context = NULL;
    } else if (ordinal->primary > 1) {
        ordinal->primary--;
    }
    pthread_mutex_unlock(&process->lock);
    if (gone)
        primary_gone(device, context);
}

int on_primary_release(const struct hook *hook, PARAMS_device)
{
    gate_forget_events();
    int result = REAL(hook, device)(ARGS_device);

    if (result == CU_SUCCESS && is_device(device) && group_join())
        release_primary(device, false);
    return result;
}

/* Destroys what the context has, and the context, however often it is retained; those who retained
   it release it later. */
int on_primary_reset(const struct hook *hook, PARAMS_device)
{
    gate_forget_events();
    int result = REAL(hook, device)(ARGS_device);

    if (result == CU_SUCCESS && is_device(device) && group_join())
        release_primary(device, true);
    return result;
}

/* A green context is a part of the device's primary one, which it retains. */
int on_green(const struct hook *hook, PARAMS_green)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    if (!is_device(device))
        return REAL(hook, green)(ARGS_green);
    int result = begin(device);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, green)(ARGS_green);
    count_primary(device, result == CU_SUCCESS, NULL);
    if (result == CU_SUCCESS)
        table_put(&(struct entry){.kind = TABLE_GREEN, .key = (uintptr_t)*context,
                                  .owner = (uint64_t)device, .gpu = GROUP_NO_GPU});
    return result;
}

int on_green_destroy(const struct hook *hook, PARAMS_handle)
{
    struct entry context;
    bool known = group_join() && table_take(TABLE_GREEN, (uintptr_t)handle, &context);

    gate_forget_events();
    int result = REAL(hook, handle)(ARGS_handle);

    if (known && result != CU_SUCCESS)
        table_put(&context);
    else if (known)
        release_primary((int)context.owner, false);
    return result;
}
