/* Streams that are captured into a graph: what is recorded, and what is not allowed meanwhile.
 * All need the lock. */
#ifndef STANDIN_CAPTURE_H
#define STANDIN_CAPTURE_H

#include "graphs.h"
#include "streams.h"

/* Refuse a look at a stream that is captured, which spoils the capture. */
CUresult capture_forbids_stream(const struct stream_place *place);
/* Record in place of doing, if the stream is captured. A kernel without a function is a copy, a
 * fill or a host function. */
CUresult capture_kernel(const struct stream_place *place, const struct function *function,
                        int *captured);
CUresult capture_alloc(const struct stream_place *place, unsigned gpu, uint64_t bytes,
                       CUdeviceptr *pointer, int *captured);
CUresult capture_free(const struct stream_place *place, struct allocation *allocation, int *captured);
CUresult capture_graph(const struct stream_place *place, struct graph *child, int *captured);
CUresult capture_records(const struct stream_place *place, struct event *event, int *captured);
/* The stream is destroyed: a capture that it is part of is spoilt. */
void capture_loses(struct stream *stream);

#endif
