/* Contexts: each thread has a stack of them, and each GPU has a counted primary one. */
#include "capture.h"
#include "graphs.h"
#include "memory.h"
#include "modules.h"
#include "pools.h"

enum { STACK = 64, LIMITS = 16 };

struct context {
    struct object object;
    int retained; /* references to a primary context */
    unsigned flags;
    size_t limits[LIMITS];
};

static struct context *primaries[MOST_GPUS];
static unsigned primary_flags[MOST_GPUS];
static int kept[MOST_GPUS]; /* references that survive a reset of the primary context */
static __thread struct object *stack[STACK];
static __thread int depth;

CUresult current_context(struct object **found)
{
    *found = depth > 0 ? stack[depth - 1] : NULL;
    if (*found == NULL)
        return INVALID_CONTEXT;
    return (*found)->destroyed ? CONTEXT_IS_DESTROYED : SUCCESS;
}

/* Free all objects that end with a context. */
static void release_of_context(const struct object *context)
{
    for (struct object *one = objects_newest(), *older; one != NULL; one = older) {
        older = one->older;
        if (one->context != context || one->destroyed)
            continue;
        if (one->type == CONTEXT) {
            release_of_context(one);
            object_destroy(one);
        } else if (one->type == ALLOCATION)
            allocation_release((struct allocation *)one);
        else if (one->type == STREAM)
            stream_release((struct stream *)one);
        else if (one->type == ARRAY)
            array_release(one);
        else if (one->type == MODULE)
            module_release((struct module *)one);
        else
            object_destroy(one);
    }
}

/* A context occupies memory of its GPU. */
static CUresult make_context(unsigned gpu, unsigned flags, struct context **made)
{
    const struct node_gpu *card = &node_get()->gpus[gpu];
    if (ledger_charge(gpu, HELD_CONTEXT, card->context_bytes) != 0)
        return OUT_OF_MEMORY;
    *made = object_new(sizeof **made, CONTEXT, gpu, 0, 0, NULL);
    (*made)->flags = flags;
    ledger_lock();
    ledger_own->gpus[gpu].contexts++;
    ledger_unlock();
    return SUCCESS;
}

static void end_context(struct context *context)
{
    unsigned gpu = context->object.gpu;
    release_of_context(&context->object);
    ledger_credit(gpu, HELD_CONTEXT, node_get()->gpus[gpu].context_bytes);
    ledger_lock();
    ledger_own->gpus[gpu].contexts--;
    ledger_unlock();
    object_destroy(&context->object);
}

static CUresult retain_primary(unsigned gpu)
{
    if (primaries[gpu] == NULL) {
        TRY(make_context(gpu, primary_flags[gpu], &primaries[gpu]));
        primaries[gpu]->retained = kept[gpu];
        kept[gpu] = 0;
    }
    primaries[gpu]->retained++;
    return SUCCESS;
}

PUBLIC CUresult cuDevicePrimaryCtxRetain(CUhandle *handle, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain);
    GPU_OF(device);
    if (handle == NULL)
        return INVALID_VALUE;
    LOCKED;
    TRY(retain_primary(gpu));
    *handle = &primaries[gpu]->object;
    return SUCCESS;
}

static CUresult reset_primary(CUdevice device, int release)
{
    GPU_OF(device);
    LOCKED;
    struct context *primary = primaries[gpu];
    if (primary == NULL && release && kept[gpu] > 0) {
        kept[gpu]--;
        return SUCCESS;
    }
    if (primary == NULL)
        return release ? INVALID_CONTEXT : SUCCESS;
    if (release && --primary->retained > 0)
        return SUCCESS;
    kept[gpu] = primary->retained;
    primaries[gpu] = NULL;
    pools_reset(gpu);
    graph_memory_reset(gpu);
    end_context(primary);
    return SUCCESS;
}

PUBLIC CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease);
    return reset_primary(device, 1);
}

PUBLIC CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease_v2);
    return reset_primary(device, 1);
}

PUBLIC CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxReset);
    return reset_primary(device, 0);
}

PUBLIC CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxReset_v2);
    return reset_primary(device, 0);
}

/* A green context retains the device's primary one, of which it is a part. */
PUBLIC CUresult cuGreenCtxCreate(CUhandle *handle, CUhandle resources, CUdevice device, unsigned flags)
{
    ENTER(cuGreenCtxCreate);
    GPU_OF(device);
    if (handle == NULL || resources == NULL || flags != 1)
        return INVALID_VALUE;
    LOCKED;
    TRY(retain_primary(gpu));
    *handle = object_new(sizeof(struct object), GREEN_CONTEXT, gpu, 0, 0, NULL);
    return SUCCESS;
}

/* A context for calls that need one. Objects that are made in it end with the primary context. */
PUBLIC CUresult cuCtxFromGreenCtx(CUhandle *handle, CUhandle green_context)
{
    ENTER(cuCtxFromGreenCtx);
    LOCKED;
    struct object *green = object_of(green_context, GREEN_CONTEXT);
    if (handle == NULL || green == NULL)
        return INVALID_VALUE;
    *handle = object_new(sizeof(struct context), CONTEXT, green->gpu, 0, 0,
                         &primaries[green->gpu]->object);
    return SUCCESS;
}

PUBLIC CUresult cuGreenCtxDestroy(CUhandle handle)
{
    CUdevice device;
    ENTER(cuGreenCtxDestroy);
    {
        LOCKED;
        struct object *green = object_of(handle, GREEN_CONTEXT);
        if (green == NULL)
            return INVALID_CONTEXT;
        device = device_of(green->gpu);
        object_destroy(green);
    }
    return reset_primary(device, 1);
}

PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER(cuDevicePrimaryCtxGetState);
    GPU_OF(device);
    LOCKED;
    *flags = primary_flags[gpu];
    *active = primaries[gpu] != NULL;
    return SUCCESS;
}

static CUresult push(struct object *context)
{
    if (depth == STACK)
        return OUT_OF_MEMORY;
    stack[depth++] = context;
    return SUCCESS;
}

static CUresult create(CUhandle *handle, unsigned flags, CUdevice device)
{
    GPU_OF(device);
    struct context *made;
    if (handle == NULL)
        return INVALID_VALUE;
    LOCKED;
    TRY(make_context(gpu, flags, &made));
    *handle = &made->object;
    return push(&made->object);
}

PUBLIC CUresult cuCtxCreate(CUhandle *context, unsigned flags, CUdevice device)
{
    ENTER(cuCtxCreate);
    return create(context, flags, device);
}

PUBLIC CUresult cuCtxCreate_v2(CUhandle *context, unsigned flags, CUdevice device)
{
    ENTER(cuCtxCreate_v2);
    return create(context, flags, device);
}

PUBLIC CUresult cuCtxCreate_v3(CUhandle *context, void *affinity, int count, unsigned flags,
                               CUdevice device)
{
    ENTER(cuCtxCreate_v3);
    return (affinity == NULL) != (count == 0) ? INVALID_VALUE : create(context, flags, device);
}

PUBLIC CUresult cuCtxCreate_v4(CUhandle *context, void *parameters, unsigned flags, CUdevice device)
{
    ENTER(cuCtxCreate_v4);
    (void)parameters;
    return create(context, flags, device);
}

static CUresult destroy(CUhandle handle)
{
    LOCKED;
    struct context *context = object_of(handle, CONTEXT);
    if (context == NULL)
        return INVALID_CONTEXT;
    for (unsigned gpu = 0; gpu < MOST_GPUS; gpu++)
        if (primaries[gpu] == context)
            return INVALID_CONTEXT;
    if (depth > 0 && stack[depth - 1] == handle)
        depth--;
    end_context(context);
    return SUCCESS;
}

PUBLIC CUresult cuCtxDestroy(CUhandle context)
{
    ENTER(cuCtxDestroy);
    return destroy(context);
}

PUBLIC CUresult cuCtxDestroy_v2(CUhandle context)
{
    ENTER(cuCtxDestroy_v2);
    return destroy(context);
}

static CUresult pop_current(CUhandle *context)
{
    if (depth == 0)
        return INVALID_CONTEXT;
    depth--;
    if (context != NULL)
        *context = stack[depth];
    return SUCCESS;
}

PUBLIC CUresult cuCtxPopCurrent(CUhandle *context)
{
    ENTER(cuCtxPopCurrent);
    return pop_current(context);
}

PUBLIC CUresult cuCtxPopCurrent_v2(CUhandle *context)
{
    ENTER(cuCtxPopCurrent_v2);
    return pop_current(context);
}

/* Replace the current context, or remove it if the handle is NULL. */
PUBLIC CUresult cuCtxSetCurrent(CUhandle handle)
{
    ENTER(cuCtxSetCurrent);
    LOCKED;
    struct context *context = handle != NULL ? object_of(handle, CONTEXT) : NULL;
    if (handle != NULL && context == NULL)
        return INVALID_CONTEXT;
    if (depth > 0)
        depth--;
    return context == NULL ? SUCCESS : push(&context->object);
}

PUBLIC CUresult cuCtxGetCurrent(CUhandle *context)
{
    ENTER(cuCtxGetCurrent);
    if (context == NULL)
        return INVALID_VALUE;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return SUCCESS;
}

PUBLIC CUresult cuCtxGetDevice(CUdevice *device)
{
    struct object *context;
    ENTER(cuCtxGetDevice);
    LOCKED;
    TRY(current_context(&context));
    *device = device_of(context->gpu);
    return SUCCESS;
}

PUBLIC CUresult cuCtxGetDevice_v2(CUdevice *device, CUhandle handle)
{
    ENTER(cuCtxGetDevice_v2);
    LOCKED;
    const struct context *context = object_of(handle, CONTEXT);
    if (context == NULL)
        return INVALID_CONTEXT;
    *device = device_of(context->object.gpu);
    return SUCCESS;
}
