#include "streams.h"

#include "capture.h"
#include "pools.h"

enum { NON_BLOCKING = 1, EVENT_NO_TIMING = 2, EVENT_FLAGS = 7 };

CUresult stream_of(CUhandle handle, int per_thread, struct stream_place *found)
{
    struct object *context;
    TRY(current_context(&context));
    *found = (struct stream_place){.gpu = context->gpu};
    if (handle == NULL || handle == STREAM_LEGACY || handle == STREAM_PER_THREAD) {
        found->legacy = handle == STREAM_LEGACY || (handle == NULL && !per_thread);
        return SUCCESS;
    }
    found->stream = object_of(handle, STREAM);
    if (found->stream == NULL)
        return INVALID_HANDLE;
    found->gpu = found->stream->object.gpu;
    return SUCCESS;
}

void stream_push(const struct stream_place *place, uint64_t ns)
{
    uint64_t number = queue_push(place->gpu, ns, NULL);
    if (place->stream != NULL)
        __atomic_store_n(&place->stream->last, number, __ATOMIC_RELAXED);
}

/* Called after the CPU has waited for the GPU's work. */
static void release_unused(unsigned gpu)
{
    LOCKED;
    pools_release_unused(gpu);
}

static CUresult create(CUhandle *handle, unsigned flags, int priority)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    if (handle == NULL || (flags & ~(unsigned)NON_BLOCKING))
        return INVALID_VALUE;
    struct stream *made = object_new(sizeof *made, STREAM, context->gpu, 0, 0, context);
    made->flags = flags;
    made->priority = priority;
    *handle = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuStreamCreate(CUhandle *stream, unsigned flags)
{
    ENTER(cuStreamCreate);
    return create(stream, flags, 0);
}

void stream_release(struct stream *stream)
{
    capture_loses(stream);
    object_destroy(&stream->object);
}

static CUresult destroy(CUhandle handle, enum type type)
{
    LOCKED;
    struct object *object = object_of(handle, type);
    if (object == NULL)
        return INVALID_HANDLE;
    if (type == STREAM)
        stream_release((struct stream *)object);
    else
        object_destroy(object);
    return SUCCESS;
}

/* The GPU of a stream, and the number of its newest work. */
static CUresult newest_of(CUhandle handle, int per_thread, unsigned *gpu, uint64_t *number)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(handle, per_thread, &place));
    TRY(capture_forbids_stream(&place));
    *gpu = place.gpu;
    *number = place.stream != NULL ? place.stream->last : queue_last(place.gpu);
    return SUCCESS;
}

static CUresult synchronize(CUhandle stream, int per_thread)
{
    unsigned gpu;
    uint64_t number;
    TRY(newest_of(stream, per_thread, &gpu, &number));
    queue_wait(gpu, number);
    release_unused(gpu);
    return SUCCESS;
}

BOTH(cuStreamSynchronize, (CUhandle stream), synchronize(stream, per_thread))

/* Wait for all work of a context, or of the current one if it is NULL. */
static CUresult synchronize_context(CUhandle handle)
{
    unsigned gpu;
    uint64_t number;
    {
        struct object *context = handle;
        LOCKED;
        if (handle == NULL)
            TRY(current_context(&context));
        if (object_of(context, CONTEXT) == NULL)
            return INVALID_CONTEXT;
        TRY(capture_forbids());
        gpu = context->gpu;
        number = queue_last(gpu);
    }
    queue_wait(gpu, number);
    release_unused(gpu);
    return SUCCESS;
}

PUBLIC CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    return synchronize_context(NULL);
}

PUBLIC CUresult cuCtxSynchronize_v2(CUhandle context)
{
    ENTER(cuCtxSynchronize_v2);
    return synchronize_context(context);
}

PUBLIC CUresult cuEventCreate(CUhandle *handle, unsigned flags)
{
    struct object *context;
    ENTER(cuEventCreate);
    LOCKED;
    TRY(current_context(&context));
    if (handle == NULL || (flags & ~(unsigned)EVENT_FLAGS))
        return INVALID_VALUE;
    struct event *made = object_new(sizeof *made, EVENT, context->gpu, 0, 0, context);
    made->flags = flags;
    *handle = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuEventDestroy(CUhandle event)
{
    ENTER(cuEventDestroy);
    return destroy(event, EVENT);
}

PUBLIC CUresult cuEventDestroy_v2(CUhandle event)
{
    ENTER(cuEventDestroy_v2);
    return destroy(event, EVENT);
}

static CUresult record(CUhandle handle, CUhandle stream, int per_thread)
{
    struct stream_place place;
    struct event *event;
    {
        LOCKED;
        TRY(stream_of(stream, per_thread, &place));
        event = object_of(handle, EVENT);
        if (event == NULL || event->object.gpu != place.gpu)
            return INVALID_HANDLE;
        int captured;
        TRY(capture_records(&place, event, &captured));
        if (captured)
            return SUCCESS;
        event->recorded = 1;
    }
    uint64_t number = queue_push(place.gpu, 0, &event->mark);
    if (place.stream != NULL)
        __atomic_store_n(&place.stream->last, number, __ATOMIC_RELAXED);
    return SUCCESS;
}

BOTH(cuEventRecord, (CUhandle event, CUhandle stream), record(event, stream, per_thread))

/* An event that may be queried. */
static CUresult event_of(CUhandle handle, struct event **event)
{
    LOCKED;
    *event = object_of(handle, EVENT);
    if (*event == NULL)
        return INVALID_HANDLE;
    return (*event)->capture != NULL ? CAPTURED_EVENT : capture_forbids();
}

PUBLIC CUresult cuEventQuery(CUhandle handle)
{
    struct event *event;
    uint64_t end;
    ENTER(cuEventQuery);
    TRY(event_of(handle, &event));
    return queue_mark_ended(event->object.gpu, &event->mark, &end) ? SUCCESS : NOT_READY;
}

PUBLIC CUresult cuEventSynchronize(CUhandle handle)
{
    struct event *event;
    ENTER(cuEventSynchronize);
    TRY(event_of(handle, &event));
    queue_wait(event->object.gpu, event->mark.number);
    release_unused(event->object.gpu);
    return SUCCESS;
}

enum { EVENT_NS = 1280 }; /* of a second event on an H200 (docs/developers/gpu-library.md) */

static CUresult elapsed(float *milliseconds, CUhandle from, CUhandle to)
{
    struct event *first, *second;
    uint64_t begin, end;
    TRY(event_of(from, &first));
    TRY(event_of(to, &second));
    if (!first->recorded || !second->recorded || ((first->flags | second->flags) & EVENT_NO_TIMING))
        return INVALID_HANDLE;
    if (!queue_mark_ended(first->object.gpu, &first->mark, &begin) ||
        !queue_mark_ended(second->object.gpu, &second->mark, &end))
        return NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end - begin + (first != second) * EVENT_NS) / 1e6);
    return SUCCESS;
}

PUBLIC CUresult cuEventElapsedTime(float *milliseconds, CUhandle from, CUhandle to)
{
    ENTER(cuEventElapsedTime);
    return elapsed(milliseconds, from, to);
}

PUBLIC CUresult cuEventElapsedTime_v2(float *milliseconds, CUhandle from, CUhandle to)
{
    ENTER(cuEventElapsedTime_v2);
    return elapsed(milliseconds, from, to);
}
