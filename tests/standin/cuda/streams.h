/* Streams and events. All streams of a process share one queue per GPU: work ends in the order
 * given. */
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
    /* Of the work recorded in the capture, how much there is and how much another stream waited
     * for. */
    uint64_t recorded, joined;
};

struct event {
    struct object object;
    unsigned flags;
    int recorded;
    struct mark mark;
    struct capture *capture; /* that it was recorded in; NULL: none */
    struct stream *recorder; /* then the stream, and how much was recorded in it */
    uint64_t recorder_count;
};

/* A stream that a handle means: an object, or one of the two default streams of the current
 * context. Needs the lock. */
struct stream_place {
    unsigned gpu;
    struct stream *stream; /* NULL: a default stream */
    int legacy;            /* the legacy default stream, which waits for all blocking ones */
};
CUresult stream_of(CUhandle handle, int per_thread, struct stream_place *found);

/* Destroy a stream, and spoil a capture that it is part of. Needs the lock. */
void stream_release(struct stream *stream);

/* Give work to a stream that is not captured. Without the lock, since it may wait. */
void stream_push(const struct stream_place *place, uint64_t ns);

#endif
