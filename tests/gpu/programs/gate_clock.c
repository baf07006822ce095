/*
 * The gate with a made-up clock and a made-up driver, for test_gate.py: two streams, whose kernels
 * take the test's time and an H200's time for events (docs/developers/gpu-library.md). Time passes while
 * the gate sleeps or spins, and as the test sets it.
 */
#include <stdlib.h>
#include <string.h>

#include "devices.h"
#include "driver.h"
#include "gate.h"

#define PUBLIC __attribute__((visibility("default")))

enum { PAIR = 1280, CALL = 2500 }; /* ns between two events; of a launch call on an idle GPU */

struct event {
    uint64_t at; /* when the stream has reached it */
};

PUBLIC uint64_t now;
PUBLIC uint64_t stream_free;  /* when the first stream has done all that was launched */
PUBLIC uint64_t other_free;   /* and the other one */
PUBLIC int capturing;
PUBLIC int live_events;
PUBLIC int created_events;
PUBLIC int illegal_calls;     /* of what must not be called in a thread that captures */
PUBLIC int create_result;     /* of cuEventCreate */
PUBLIC int query_result;      /* of cuEventQuery, where the event was reached */
PUBLIC int record_result;     /* of cuEventRecord */
PUBLIC const char *function_name, *kernel_name;
PUBLIC void (*slept)(uint64_t then); /* called before a sleep ends */
PUBLIC uint64_t longest_sleep, spun;

static int capture_mode;

uint64_t gate_now(void)
{
    return now;
}

void sleep_until(uint64_t then)
{
    longest_sleep = then - now > longest_sleep ? then - now : longest_sleep;
    if (slept)
        slept(then);
    now = then > now ? then : now;
}

void spin_until(uint64_t then)
{
    spun += then - now;
    now = then;
}

bool is_capturing(void *stream)
{
    (void)stream;
    return capturing;
}

int begin_own_calls(void)
{
    int before = capture_mode;

    capture_mode = CU_CAPTURE_RELAXED;
    return before;
}

void end_own_calls(int mode)
{
    capture_mode = mode;
}

static void must_be_legal(void)
{
    illegal_calls += capturing || capture_mode != CU_CAPTURE_RELAXED;
}

static int event_create(void **made, unsigned flags)
{
    (void)flags;
    must_be_legal();
    if (create_result)
        return create_result;
    *made = calloc(1, sizeof(struct event));
    live_events++;
    created_events++;
    return CU_SUCCESS;
}

static int event_destroy(void *event)
{
    live_events--;
    free(event);
    return CU_SUCCESS;
}

static uint64_t *free_of(void *stream)
{
    return stream ? &other_free : &stream_free;
}

static int event_record(void *event, void *stream)
{
    must_be_legal();
    if (record_result)
        return record_result;
    ((struct event *)event)->at = *free_of(stream) > now ? *free_of(stream) : now;
    return CU_SUCCESS;
}

static int event_query(void *event)
{
    must_be_legal();
    return ((struct event *)event)->at > now ? CU_NOT_READY : query_result;
}

static int event_elapsed(float *milliseconds, void *start, void *end)
{
    *milliseconds = (float)(((struct event *)end)->at + PAIR - ((struct event *)start)->at) / 1e6f;
    return CU_SUCCESS;
}

static int get_function_name(const char **name, void *function)
{
    (void)function;
    *name = function_name;
    return function_name ? CU_SUCCESS : CU_INVALID_VALUE;
}

static int get_kernel_name(const char **name, void *kernel)
{
    (void)kernel;
    *name = kernel_name;
    return kernel_name ? CU_SUCCESS : CU_INVALID_VALUE;
}

struct driver driver = {
    .cuEventCreate = event_create,
    .cuEventDestroy_v2 = event_destroy,
    .cuEventRecord = event_record,
    .cuEventQuery = event_query,
    .cuEventElapsedTime = event_elapsed,
    .cuFuncGetName = get_function_name,
    .cuKernelGetName = get_kernel_name,
};

/* Launch, and give the stream that much to do. The time at which the driver got it. */
PUBLIC uint64_t launch(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, int kind, void *what, void *stream, uint64_t ns, int result)
{
    struct gate_launch one = {.limit = limit, .gpu = gpu, .kind = kind, .what = what,
                              .stream = stream};

    gate_before(&one);
    uint64_t at = now;

    if (result == CU_SUCCESS && !capturing)
        *free_of(stream) = (*free_of(stream) > now ? *free_of(stream) : now + CALL) + ns;
    gate_after(&one, result);
    return at;
}

PUBLIC void forget_events(void)
{
    gate_forget_events();
}
