/* Streams and events. All streams of a process share one queue per GPU, so work ends in the
 * order in which it was given. */
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

#include "objects.h"
#include "queue.h"

struct capture;

struct stream {
    struct object object;
    unsigned flags;
    int priority;
    uint64_t last;           /* number of its newest work */
    struct capture *capture; /* NULL: it is not captured */
    /* The amount of work recorded in the capture, and the part of it for which another stream
     * has waited. */
    uint64_t recorded, joined;
};

struct event {
    struct object object;
    unsigned flags;
    int recorded;
    struct mark mark;
    struct capture *capture; /* the capture that recorded it; NULL: none */
    struct stream *recorder; /* if captured: the stream, and its recorded work */
    uint64_t recorder_count;
};

/* The stream of a handle: an object, or one of the two default streams of the current context.
 * Needs the lock. */
struct stream_place {
    unsigned gpu;
    struct stream *stream; /* NULL: a default stream */
    int legacy;            /* the legacy default stream, which waits for all blocking ones */
};
CUresult stream_of(CUhandle handle, int per_thread, struct stream_place *found);

/* Destroy a stream, which spoils its capture. Needs the lock. */
void stream_release(struct stream *stream);

/* Give work to a stream that is not captured. Takes no lock, because it may wait. */
void stream_push(const struct stream_place *place, uint64_t ns);

#endif
