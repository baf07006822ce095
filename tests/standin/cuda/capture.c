#include "capture.h"

#include <stdlib.h>

enum mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
enum status { NONE = 0, ACTIVE = 1, INVALIDATED = 2 };
enum { NON_BLOCKING = 1 };

struct capture {
    struct graph *graph;
    struct stream *origin;
    pthread_t thread;
    enum mode mode;
    int invalid;
    uint64_t id;
    struct capture *next;
};

static struct capture *captures;
static uint64_t last_id;
static __thread enum mode thread_mode = GLOBAL;

/* Refuse unsafe calls during a capture, by the rules of cuThreadExchangeStreamCaptureMode. */
CUresult capture_forbids(void)
{
    CUresult result = SUCCESS;
    for (struct capture *one = captures; one != NULL; one = one->next) {
        int own = pthread_equal(one->thread, pthread_self()) && one->mode != RELAXED;
        int other = thread_mode == GLOBAL && one->mode == GLOBAL;
        if (thread_mode == RELAXED || (!own && !other))
            continue;
        one->invalid = 1;
        result = CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* The legacy default stream would wait for every blocking stream. */
static CUresult legacy_forbidden(const struct stream_place *place)
{
    CUresult result = SUCCESS;
    if (!place->legacy)
        return SUCCESS;
    for (struct object *one = objects_newest(); one != NULL; one = one->older) {
        const struct stream *stream = (const struct stream *)one;
        if (one->type != STREAM || stream->capture == NULL || (stream->flags & NON_BLOCKING))
            continue;
        stream->capture->invalid = 1;
        result = CAPTURE_IMPLICIT;
    }
    return result;
}

CUresult capture_forbids_stream(const struct stream_place *place)
{
    TRY(legacy_forbidden(place));
    if (place->stream == NULL || place->stream->capture == NULL)
        return capture_forbids();
    place->stream->capture->invalid = 1;
    return CAPTURE_UNSUPPORTED;
}

/* The graph that records a stream's work; NULL if the work is executed. */
static CUresult recorded_in(const struct stream_place *place, struct graph **graph)
{
    *graph = NULL;
    TRY(legacy_forbidden(place));
    if (place->stream == NULL || place->stream->capture == NULL)
        return SUCCESS;
    if (place->stream->capture->invalid)
        return CAPTURE_INVALIDATED;
    place->stream->recorded++;
    *graph = place->stream->capture->graph;
    return SUCCESS;
}

CUresult capture_kernel(const struct stream_place *place, const struct function *function,
                        int *captured)
{
    struct graph *graph;
    TRY(recorded_in(place, &graph));
    *captured = graph != NULL;
    if (graph != NULL)
        graph_add(graph, function != NULL ? NODE_KERNEL : NODE_MEMCPY,
                  function != NULL ? function->ns : 0);
    return SUCCESS;
}

CUresult capture_alloc(const struct stream_place *place, unsigned gpu, uint64_t bytes,
                       CUdeviceptr *pointer, int *captured)
{
    struct graph *graph;
    TRY(recorded_in(place, &graph));
    *captured = graph != NULL;
    if (graph != NULL)
        *pointer = graph_add_alloc(graph, gpu, bytes)->allocation->object.start;
    return SUCCESS;
}

CUresult capture_free(const struct stream_place *place, struct allocation *allocation, int *captured)
{
    struct graph *graph;
    TRY(recorded_in(place, &graph));
    *captured = graph != NULL;
    return graph != NULL ? graph_add_free(graph, allocation) : SUCCESS;
}

CUresult capture_graph(const struct stream_place *place, struct graph *child, int *captured)
{
    struct graph *graph;
    TRY(recorded_in(place, &graph));
    *captured = graph != NULL;
    if (graph != NULL)
        graph_add(graph, NODE_GRAPH, 0)->child = child;
    return SUCCESS;
}

CUresult capture_records(const struct stream_place *place, struct event *event, int *captured)
{
    struct graph *graph;
    TRY(recorded_in(place, &graph));
    *captured = graph != NULL;
    event->capture = graph != NULL ? place->stream->capture : NULL;
    event->recorder = graph != NULL ? place->stream : NULL;
    event->recorder_count = graph != NULL ? place->stream->recorded : 0;
    return SUCCESS;
}

void capture_loses(struct stream *stream)
{
    if (stream->capture == NULL)
        return;
    stream->capture->invalid = 1;
    if (stream->capture->origin != stream)
        stream->capture = NULL;
}

static CUresult begin(CUhandle handle, CUhandle into, int mode, int per_thread)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(handle, per_thread, &place));
    if (place.stream == NULL)
        return CAPTURE_UNSUPPORTED;
    if (mode < GLOBAL || mode > RELAXED)
        return INVALID_VALUE;
    if (place.stream->capture != NULL)
        return ILLEGAL_STATE;
    struct graph *graph = into != NULL ? object_of(into, GRAPH) : graph_new();
    struct capture *made = calloc(1, sizeof *made);
    if (graph == NULL || made == NULL)
        return INVALID_VALUE;
    *made = (struct capture){.graph = graph,
                             .origin = place.stream,
                             .thread = pthread_self(),
                             .mode = (enum mode)mode,
                             .id = ++last_id,
                             .next = captures};
    captures = made;
    place.stream->capture = made;
    place.stream->recorded = place.stream->joined = 0;
    return SUCCESS;
}

/* Take the capture from its streams; returns whether one of them was not joined to the origin. */
static int dissolve(struct capture *capture)
{
    int unjoined = 0;
    for (struct object *one = objects_newest(); one != NULL; one = one->older) {
        struct stream *stream = (struct stream *)one;
        struct event *event = (struct event *)one;
        if (one->type == EVENT && event->capture == capture)
            event->capture = NULL;
        if (one->type != STREAM || stream->capture != capture)
            continue;
        stream->capture = NULL;
        if (stream != capture->origin && stream->joined != stream->recorded)
            unjoined = 1;
    }
    struct capture **place = &captures;
    while (*place != capture)
        place = &(*place)->next;
    *place = capture->next;
    return unjoined;
}

static CUresult end(CUhandle handle, CUhandle *graph, int per_thread)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(handle, per_thread, &place));
    struct capture *capture = place.stream != NULL ? place.stream->capture : NULL;
    if (capture == NULL || graph == NULL)
        return graph == NULL ? INVALID_VALUE : ILLEGAL_STATE;
    if (capture->origin != place.stream) {
        capture->invalid = 1;
        return CAPTURE_UNMATCHED;
    }
    if (capture->mode != RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return CAPTURE_WRONG_THREAD;
    CUresult result = dissolve(capture) ? CAPTURE_UNJOINED : SUCCESS;
    if (capture->invalid)
        result = CAPTURE_INVALIDATED;
    *graph = result == SUCCESS ? &capture->graph->object : NULL;
    free(capture);
    return result;
}

BOTH(cuStreamBeginCapture, (CUhandle stream), begin(stream, NULL, GLOBAL, per_thread))
BOTH(cuStreamBeginCapture_v2, (CUhandle stream, int mode), begin(stream, NULL, mode, per_thread))
BOTH(cuStreamEndCapture, (CUhandle stream, CUhandle *graph), end(stream, graph, per_thread))

static CUresult look(CUhandle handle, int *status, uint64_t *id, CUhandle *graph, int per_thread)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(handle, per_thread, &place));
    if (status == NULL)
        return INVALID_VALUE;
    if (place.legacy)
        for (const struct capture *one = captures; one != NULL; one = one->next)
            if (!(one->origin->flags & NON_BLOCKING))
                return CAPTURE_IMPLICIT;
    const struct capture *capture = place.stream != NULL ? place.stream->capture : NULL;
    *status = capture == NULL ? NONE : capture->invalid ? INVALIDATED : ACTIVE;
    if (id != NULL && *status == ACTIVE)
        *id = capture->id;
    if (graph != NULL && *status == ACTIVE)
        *graph = &capture->graph->object;
    return SUCCESS;
}

BOTH(cuStreamIsCapturing, (CUhandle stream, int *status), look(stream, status, NULL, NULL, per_thread))
BOTH(cuStreamGetCaptureInfo, (CUhandle stream, int *status, uint64_t *id),
     look(stream, status, id, NULL, per_thread))

static CUresult look_closely(CUhandle stream, int *status, uint64_t *id, CUhandle *graph,
                             const CUhandle **last, size_t *count, int per_thread)
{
    if (last != NULL)
        *last = NULL;
    if (count != NULL)
        *count = 0;
    return look(stream, status, id, graph, per_thread);
}

BOTH(cuStreamGetCaptureInfo_v2,
     (CUhandle stream, int *status, uint64_t *id, CUhandle *graph, const CUhandle **last,
      size_t *count),
     look_closely(stream, status, id, graph, last, count, per_thread))
BOTH(cuStreamGetCaptureInfo_v3,
     (CUhandle stream, int *status, uint64_t *id, CUhandle *graph, const CUhandle **last,
      const void **edges __attribute__((unused)), size_t *count),
     look_closely(stream, status, id, graph, last, count, per_thread))

PUBLIC CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER(cuThreadExchangeStreamCaptureMode);
    if (mode == NULL || *mode < GLOBAL || *mode > RELAXED)
        return INVALID_VALUE;
    enum mode before = thread_mode;
    thread_mode = (enum mode)*mode;
    *mode = (int)before;
    return SUCCESS;
}
