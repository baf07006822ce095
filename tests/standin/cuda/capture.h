/* What a stream that is captured into a graph allows and records. All need the lock. */
#ifndef STANDIN_CAPTURE_H
#define STANDIN_CAPTURE_H

#include "modules.h"
#include "streams.h"

/* Refuse a look at a stream that is captured, which spoils the capture. */
CUresult capture_forbids_stream(const struct stream_place *place);
/* Record in place of doing, if the stream is captured. */
CUresult capture_kernel(const struct stream_place *place, const struct function *function,
                        int *captured);
CUresult capture_records(const struct stream_place *place, struct event *event, int *captured);
CUresult capture_waits(const struct stream_place *place, struct event *event);

#endif
