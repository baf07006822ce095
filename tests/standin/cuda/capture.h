/* Streams that are captured into a graph: the recorded work, and the calls that are forbidden
 * meanwhile. All need the lock. */
#ifndef STANDIN_CAPTURE_H
#define STANDIN_CAPTURE_H

#include "graphs.h"
#include "streams.h"

/* Refuse a query of a stream that is captured; the query spoils the capture. */
CUresult capture_forbids_stream(const struct stream_place *place);
/* Record the work, if the stream is captured, in place of executing it. A kernel without a
 * function is a copy, a fill or a host function. */
CUresult capture_kernel(const struct stream_place *place, const struct function *function,
                        int *captured);
CUresult capture_alloc(const struct stream_place *place, unsigned gpu, uint64_t bytes,
                       CUdeviceptr *pointer, int *captured);
CUresult capture_free(const struct stream_place *place, struct allocation *allocation, int *captured);
CUresult capture_graph(const struct stream_place *place, struct graph *child, int *captured);
CUresult capture_records(const struct stream_place *place, struct event *event, int *captured);
/* The stream is destroyed, which spoils its capture. */
void capture_loses(struct stream *stream);

#endif
