/* Copies and fills. They check their addresses, and are kept in the order of their stream;
 * memory has no content here. */
#include "capture.h"
#include "memory.h"
#include "streams.h"

/* Either address may be 0: that side is not device memory. */
static CUresult copy(uint64_t to, uint64_t from, size_t bytes, CUhandle stream, int per_thread,
                     int waits)
{
    struct stream_place place;
    {
        LOCKED;
        TRY(stream_of(stream, per_thread, &place));
        if ((to != 0 && !memory_is_usable(to, bytes)) ||
            (from != 0 && !memory_is_usable(from, bytes)))
            return INVALID_VALUE;
        int captured;
        TRY(capture_kernel(&place, NULL, &captured));
        if (captured)
            return waits ? CAPTURE_UNSUPPORTED : SUCCESS;
    }
    stream_push(&place, 0);
    if (waits)
        queue_wait(place.gpu, queue_last(place.gpu));
    return SUCCESS;
}

/* An export that copies at once, of the default stream that its name says. */
#define COPY(symbol, parameters, to, from, bytes)                                                  \
    PUBLIC CUresult symbol parameters                                                              \
    {                                                                                              \
        ENTER(symbol);                                                                             \
        return copy(to, from, bytes, NULL, 0, 1);                                                  \
    }                                                                                              \
    PUBLIC CUresult symbol##_ptds parameters                                                       \
    {                                                                                              \
        ENTER(symbol##_ptds);                                                                      \
        return copy(to, from, bytes, NULL, 1, 1);                                                  \
    }

COPY(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from __attribute__((unused)), size_t bytes), to, 0,
     bytes)
COPY(cuMemcpyDtoH_v2, (void *to __attribute__((unused)), CUdeviceptr from, size_t bytes), 0, from,
     bytes)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
COPY(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value __attribute__((unused)), size_t count), to, 0,
     count)
COPY(cuMemsetD32_v2, (CUdeviceptr to, unsigned value __attribute__((unused)), size_t count), to, 0,
     count * 4)

BOTH(cuMemcpyHtoDAsync_v2,
     (CUdeviceptr to, const void *from __attribute__((unused)), size_t bytes, CUhandle stream),
     copy(to, 0, bytes, stream, per_thread, 0))
BOTH(cuMemcpyDtoHAsync_v2,
     (void *to __attribute__((unused)), CUdeviceptr from, size_t bytes, CUhandle stream),
     copy(0, from, bytes, stream, per_thread, 0))
BOTH(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUhandle stream),
     copy(to, from, bytes, stream, per_thread, 0))
BOTH(cuMemsetD8Async,
     (CUdeviceptr to, unsigned char value __attribute__((unused)), size_t count, CUhandle stream),
     copy(to, 0, count, stream, per_thread, 0))
BOTH(cuMemsetD32Async,
     (CUdeviceptr to, unsigned value __attribute__((unused)), size_t count, CUhandle stream),
     copy(to, 0, count * 4, stream, per_thread, 0))
