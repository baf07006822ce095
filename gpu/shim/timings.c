/* Measures the GPU time of launches with CUDA events. Measured times correct the estimates and show
   which launches are finished. */
#define _GNU_SOURCE
#include "gate.h"

#include <sched.h>

#include "devices.h"
#include "driver.h"
#include "forks.h"

enum {
    TIMINGS = 64,        /* the most at the same time */
    LOOK_EVERY = 200000, /* ns between two looks at events */
    FRESH = 1000000,     /* ns for which a look shows what is unfinished */
    PAIR = 1280,         /* ns between two events with nothing between them, on an H200 */
    CALL = 2500,         /* ns of a launch call in which an idle H200 waits for the kernel */
};

#define MOST_UNTIMED UINT64_C(1000000) /* ns; after more untimed launches the next one is timed */

enum timing_state { TIMING_FREE, TIMING_FILLED_IN, TIMING_RUNS };

struct timing {
    int state; /* enum timing_state */
    void *start, *end; /* events */
    struct estimate *estimate;
    void *what; /* the estimate may be reused for another one */
    const struct pf_gpu_limit *limit;
    struct pf_gpu *gpu;
    const void *stream;
    uint64_t extra; /* ns between the events that are not the launch's */
    struct gate_time covers; /* this launch, and the untimed ones before it */
};

/* Zero in the child of a fork, since the events are the parent's. */
static struct timings {
    struct timing timing[TIMINGS];
    struct gate_time untimed; /* launches since the last timed one */
    struct pf_gpu *gpu;
    uint64_t covered_ns;      /* by all running timings */
    int running;              /* timings that are not FREE */
    int lock;                 /* 1: a thread looks at events */
    uint64_t looks_at;        /* the time of the next look */
} *timings;

__attribute__((constructor)) static void make_timings(void)
{
    timings = zero_after_fork(sizeof *timings);
}

#define TAKE(PLACE) __atomic_exchange_n(&(PLACE), 0, __ATOMIC_RELAXED)

static bool is_running(const struct timing *timing)
{
    return __atomic_load_n(&timing->state, __ATOMIC_ACQUIRE) == TIMING_RUNS;
}

/* Whether this thread may end a running timing: a process that ends takes no lock. */
static bool claim(struct timing *timing)
{
    int runs = TIMING_RUNS;

    return __atomic_compare_exchange_n(&timing->state, &runs, TIMING_FILLED_IN, false,
                                       __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void destroy(void *event)
{
    if (event)
        driver.cuEventDestroy_v2(event);
}

static bool can_time(void)
{
    return driver.cuEventCreate && driver.cuEventDestroy_v2 && driver.cuEventRecord &&
           driver.cuEventQuery && driver.cuEventElapsedTime;
}

static struct gate_time take_untimed(void)
{
    struct gate_time *untimed = &timings->untimed;

    return (struct gate_time){.ns = TAKE(untimed->ns), .paid_ns = TAKE(untimed->paid_ns)};
}

static void add_untimed(struct gate_time time)
{
    ADD(timings->untimed.paid_ns, time.paid_ns);
    ADD(timings->untimed.ns, time.ns);
}

static void finish(struct pf_gpu *gpu, struct gate_time time)
{
    ADD(gpu->finished_ns, time.ns);
    ADD(gpu->paid_finished_ns, time.paid_ns);
}

/* Count launches that cannot be timed as finished: otherwise each launch would try again. */
static void give_up(const struct gate_launch *launch)
{
    finish(launch->gpu, launch->time);
    finish(launch->gpu, take_untimed());
}

void timing_begin(struct gate_launch *launch)
{
    bool due = estimate_counts(launch->estimate);

    if (!timings || !can_time()) {
        finish(launch->gpu, launch->time);
        return;
    }
    STORE(timings->gpu, launch->gpu);
    due |= LOAD(timings->untimed.ns) + launch->time.ns >= MOST_UNTIMED;
    if (!due || LOAD(timings->running) >= TIMINGS) {
        add_untimed(launch->time);
        return;
    }
    int mode = begin_own_calls();
    void *start = NULL;

    if (driver.cuEventCreate(&start, 0) == CU_SUCCESS &&
        driver.cuEventRecord(start, launch->stream) == CU_SUCCESS) {
        launch->start = start;
    } else {
        destroy(start);
        give_up(launch);
    }
    end_own_calls(mode);
}

static struct timing *free_timing(void)
{
    for (int i = 0; i < TIMINGS; i++) {
        int free = TIMING_FREE;

        if (__atomic_compare_exchange_n(&timings->timing[i].state, &free, TIMING_FILLED_IN, false,
                                        __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            ADD(timings->running, 1);
            return &timings->timing[i];
        }
    }
    return NULL;
}

static void free_again(struct timing *timing)
{
    __atomic_fetch_sub(&timings->running, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&timing->state, TIMING_FREE, __ATOMIC_RELEASE);
}

/* If the event before the launch is done already, the GPU was idle and waited for the program. */
static uint64_t extra(const struct gate_launch *launch)
{
    return PAIR + (driver.cuEventQuery(launch->start) == CU_SUCCESS ? CALL : 0);
}

static void fill_in(struct timing *timing, const struct gate_launch *launch, void *end)
{
    timing->start = launch->start;
    timing->end = end;
    timing->estimate = launch->estimate;
    timing->what = launch->what;
    timing->limit = launch->limit;
    timing->gpu = launch->gpu;
    timing->stream = launch->stream;
    timing->extra = extra(launch);
    timing->covers = take_untimed();
    timing->covers.ns += launch->time.ns;
    timing->covers.paid_ns += launch->time.paid_ns;
    ADD(timings->covered_ns, timing->covers.ns);
    estimate_timing_begins(launch->estimate, launch->what);
    __atomic_store_n(&timing->state, TIMING_RUNS, __ATOMIC_RELEASE);
}

void gate_timed(struct gate_launch *launch, int result)
{
    struct timing *timing = result == CU_SUCCESS ? free_timing() : NULL;
    int mode = begin_own_calls();
    void *end = NULL;

    if (timing && driver.cuEventCreate(&end, 0) == CU_SUCCESS &&
        driver.cuEventRecord(end, launch->stream) == CU_SUCCESS) {
        fill_in(timing, launch, end);
    } else {
        destroy(launch->start);
        destroy(end);
        if (timing)
            free_again(timing);
        give_up(launch);
    }
    end_own_calls(mode);
    launch->start = NULL;
}

static void end(struct timing *timing)
{
    destroy(timing->start);
    destroy(timing->end);
    estimate_timing_ends(timing->estimate, timing->what);
    __atomic_fetch_sub(&timings->covered_ns, timing->covers.ns, __ATOMIC_RELAXED);
    finish(timing->gpu, timing->covers);
    free_again(timing);
}

/* Take a timing whose launch is done or failed. */
static void look_at(struct timing *timing)
{
    float milliseconds = 0;
    int result = driver.cuEventQuery(timing->end);

    if (result == CU_NOT_READY || !claim(timing))
        return;
    if (result == CU_SUCCESS &&
        driver.cuEventElapsedTime(&milliseconds, timing->start, timing->end) == CU_SUCCESS &&
        milliseconds >= 0) {
        float most = 1e8; /* ms; no measurement is longer, and its ns fit in 64 bits */
        uint64_t ns = (uint64_t)((double)(milliseconds < most ? milliseconds : most) * 1e6);
        uint64_t of_launch = ns > timing->extra ? ns - timing->extra : 0;
        uint64_t more = estimate_measured(timing->estimate, timing->what, of_launch);

        /* For launches before this one, some of which may run: they finish with the next timing. */
        if (more > 0)
            add_untimed(gate_charge(timing->limit, timing->gpu, more));
    }
    end(timing);
}

static bool lock(void)
{
    return __atomic_exchange_n(&timings->lock, 1, __ATOMIC_ACQUIRE) == 0;
}

void timings_update(uint64_t now)
{
    if (!timings || LOAD(timings->running) == 0 || now < LOAD(timings->looks_at) || !lock())
        return;
    int mode = begin_own_calls();

    for (int i = 0; i < TIMINGS; i++)
        if (is_running(&timings->timing[i]))
            look_at(&timings->timing[i]);
    end_own_calls(mode);
    STORE(timings->looks_at, now + LOOK_EVERY);
    __atomic_store_n(&timings->lock, 0, __ATOMIC_RELEASE);
}

void gate_forget_events(void)
{
    if (!timings || LOAD(timings->running) == 0)
        return;
    while (!lock())
        sched_yield();
    int mode = begin_own_calls();

    for (int i = 0; i < TIMINGS; i++)
        if (claim(&timings->timing[i]))
            end(&timings->timing[i]);
    end_own_calls(mode);
    __atomic_store_n(&timings->lock, 0, __ATOMIC_RELEASE);
}

bool timings_unfinished(uint64_t now)
{
    return timings && LOAD(timings->running) > 0 && now < LOAD(timings->looks_at) + FRESH;
}

/* A process that ends stops its launches. The region stays mapped until the end. */
__attribute__((destructor)) static void finish_all(void)
{
    if (!timings)
        return;
    for (int i = 0; i < TIMINGS; i++)
        if (claim(&timings->timing[i]))
            finish(timings->timing[i].gpu, timings->timing[i].covers);
    if (timings->gpu)
        finish(timings->gpu, take_untimed());
}

bool timings_queue(const void *stream, uint64_t most)
{
    uint64_t ns = 0;

    if (!timings || LOAD(timings->covered_ns) <= most)
        return false;
    for (int i = 0; i < TIMINGS && ns <= most; i++) {
        const struct timing *timing = &timings->timing[i];

        if (is_running(timing) && timing->stream == stream)
            ns += timing->covers.ns;
    }
    return ns > most;
}
