/* Contexts. No call reports the memory of a process' first context. The agent measures this memory.
   Until then a number from `limits` counts. */
#include "devices.h"
#include "driver.h"
#include "gate.h"
#include "group.h"
#include "hooks.h"
#include "process.h"

/* Count a context. Only the first one uses memory. False: it does not fit. */
static bool add_context(void)
{
    bool done = true;

    pthread_mutex_lock(&process->lock);
    if (process->contexts == 0)
        done = group_charge_context();
    process->contexts += done;
    pthread_mutex_unlock(&process->lock);
    if (!done)
        group_denied();
    return done;
}

struct dropping {
    uint64_t context; /* 0: all */
    uint64_t bytes;
};

static bool drop(struct entry *entry, void *with)
{
    struct dropping *dropping = with;

    if (dropping->context != 0 && entry->owner != dropping->context)
        return true;
    dropping->bytes += entry->bytes;
    return false;
}

/* NULL: the process has no context any more. Only then are allocations in green contexts released. */
static void drop_allocations(void *context)
{
    struct dropping dropping = {.context = (uintptr_t)context};

    table_visit(TABLE_POINTER, drop, &dropping);
    table_visit(TABLE_ARRAY, drop, &dropping);
    group_release(dropping.bytes);
}

static void remove_context(void)
{
    pthread_mutex_lock(&process->lock);
    if (process->contexts > 0 && --process->contexts == 0) {
        group_release_context();
        drop_allocations(NULL);
    }
    pthread_mutex_unlock(&process->lock);
}

static int begin(int device)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    return place_of_device(device) == OURS && add_context() ? CU_SUCCESS : CU_OUT_OF_MEMORY;
}

static int finish(int result, void *const *context)
{
    if (result != CU_SUCCESS)
        remove_context();
    else if (context)
        table_put(&(struct entry){.kind = TABLE_CONTEXT, .key = (uintptr_t)*context});
    return result;
}

#define CREATE(ACT, ABI)                                                              \
    int ACT(const struct hook *hook, PARAMS_##ABI)                                    \
    {                                                                                 \
        int result = begin(device);                                                   \
                                                                                      \
        return result ? result : finish(REAL(hook, ABI)(ARGS_##ABI), context);        \
    }

CREATE(on_context, context)
CREATE(on_context_v3, context_v3)
CREATE(on_context_v4, context_v4)

int on_context_destroy(const struct hook *hook, PARAMS_handle)
{
    struct entry context;
    bool known = group_join() && table_take(TABLE_CONTEXT, (uintptr_t)handle, &context);

    gate_forget_events();
    int result = REAL(hook, handle)(ARGS_handle);

    if (known && result != CU_SUCCESS) {
        table_put(&context);
    } else if (known) {
        drop_allocations(handle);
        remove_context();
    }
    return result;
}

/* After a call that retains the primary context and counted a context: count it once. */
static void count_primary(bool retained, void *context)
{
    pthread_mutex_lock(&process->lock);
    bool first = retained && process->primary++ == 0;

    if (retained && context)
        process->primary_context = context;
    pthread_mutex_unlock(&process->lock);
    if (!first)
        remove_context();
}

int on_primary_retain(const struct hook *hook, PARAMS_primary)
{
    int result = begin(device);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, primary)(ARGS_primary);
    count_primary(result == CU_SUCCESS, result == CU_SUCCESS ? *context : NULL);
    return result;
}

static void primary_gone(void *context)
{
    if (context)
        drop_allocations(context);
    remove_context();
    settle_pools();
    if (process->graph_bytes > 0)
        settle_graphs(0);
}

/* After a call that releases the primary context once; or, with `all`, resets it. */
static void release_primary(int device, bool all)
{
    unsigned flags;
    int active = 0;

    pthread_mutex_lock(&process->lock);
    bool known = !all && driver.cuDevicePrimaryCtxGetState &&
                 driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CU_SUCCESS;
    bool gone = process->primary > 0 && (known ? !active : all || process->primary == 1);
    void *context = process->primary_context;

    if (gone) {
        process->primary = 0;
        process->primary_context = NULL;
    } else if (process->primary > 1) {
        process->primary--;
    }
    pthread_mutex_unlock(&process->lock);
    if (gone)
        primary_gone(context);
}

static int release(const struct hook *hook, int device, bool all)
{
    gate_forget_events();
    int result = REAL(hook, device)(ARGS_device);

    if (result == CU_SUCCESS && group_join() && place_of_device(device) == OURS)
        release_primary(device, all);
    return result;
}

int on_primary_release(const struct hook *hook, PARAMS_device)
{
    return release(hook, device, false);
}

/* A reset destroys the context, however often it is retained. Its users release it later. */
int on_primary_reset(const struct hook *hook, PARAMS_device)
{
    return release(hook, device, true);
}

/* A green context is part of the device's primary context, which it retains. */
int on_green(const struct hook *hook, PARAMS_green)
{
    int result = begin(device);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, green)(ARGS_green);
    count_primary(result == CU_SUCCESS, NULL);
    if (result == CU_SUCCESS)
        table_put(&(struct entry){.kind = TABLE_GREEN, .key = (uintptr_t)*context});
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
        release_primary(our_device(), false);
    return result;
}
