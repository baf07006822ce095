#define _GNU_SOURCE
#include "estimates.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "devices.h"
#include "driver.h"

enum {
    WAYS = 8,   /* entries that a handle can be in */
    SETS = 256, /* a power of two */
    MEASUREMENTS = 8,
    FIRST = 4,        /* launches of a function that are all timed, */
    EVERY = 64,       /* and then one of so many */
    TIMINGS = 64,     /* at the same time */
    UNIT = 16,        /* of a measurement, ns */
    UNKNOWN = 20000,  /* what a launch is taken for before two are measured, ns */
    SHORTEST = 500,   /* ns; the resolution of events */
    LOOK_EVERY = 200000, /* ns between two looks at events */
};

#define LONGEST UINT64_C(60000000000) /* ns */

struct estimate {
    void *what;        /* NULL: unused */
    uint64_t ns;       /* 0: not measured yet */
    uint32_t launches; /* wraps */
    uint32_t unpaid;   /* launches that were charged as UNKNOWN */
    uint32_t measured[MEASUREMENTS]; /* in units; under the lock, like the next one */
    uint16_t measurements;
    uint16_t timed;        /* timings of it that are not done */
    bool spared;
} __attribute__((aligned(64)));

_Static_assert(sizeof(struct estimate) == 64, "one cache line");

enum timing_state { TIMING_FREE, TIMING_FILLED_IN, TIMING_RUNS };

struct timing {
    int state; /* enum timing_state */
    void *start, *end; /* events */
    struct estimate *estimate;
    void *what; /* it was for; the estimate may be another's by now */
    const struct pf_gpu_limit *limit;
    struct pf_gpu *gpu;
};

/* In the child of a fork the kernel makes it all zero (MADV_WIPEONFORK): events are the
   parent's. */
static struct estimates {
    struct estimate estimate[SETS][WAYS];
    struct timing timing[TIMINGS];
    int running;       /* timings that are not FREE */
    int lock;          /* 1: a thread looks at events */
    uint64_t looks_at; /* when to look at events again */
} *estimates;

__attribute__((constructor)) static void make_estimates(void)
{
    void *made = mmap(NULL, sizeof *estimates, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (made == MAP_FAILED)
        return;
#ifdef MADV_WIPEONFORK
    madvise(made, sizeof *estimates, MADV_WIPEONFORK);
#endif
    estimates = made;
}

#define LOAD(PLACE) __atomic_load_n(&(PLACE), __ATOMIC_RELAXED)
#define STORE(PLACE, VALUE) __atomic_store_n(&(PLACE), (VALUE), __ATOMIC_RELAXED)

/* ---- by handle --------------------------------------------------------------------------- */

/* In C++ a name begins with its length: _Z27ncclDevKernel_AllReduce… */
static bool is_nccl(const char *name)
{
    if (strncmp(name, "_Z", 2) == 0)
        name += 2 + strspn(name + 2, "0123456789");
    return strncmp(name, "nccl", 4) == 0;
}

static bool is_spared(enum gate_kind kind, void *what)
{
    const char *name = NULL;

    if (kind != GATE_KERNEL)
        return false;
    if (driver.cuFuncGetName && driver.cuFuncGetName(&name, what) == CU_SUCCESS && name)
        return is_nccl(name);
    return driver.cuKernelGetName && driver.cuKernelGetName(&name, what) == CU_SUCCESS && name &&
           is_nccl(name);
}

/* The entry of a set that was launched least, for something else; the others count half of what
   they did, so that an old favourite goes in the end. Threads that still use it for what it was for
   spoil a measurement at most. */
static struct estimate *replaced(struct estimate *set, void *what)
{
    struct estimate *least = set;

    for (int i = 1; i < WAYS; i++)
        if (LOAD(set[i].launches) < LOAD(least->launches))
            least = &set[i];
    for (int i = 0; i < WAYS; i++)
        STORE(set[i].launches, LOAD(set[i].launches) / 2 / EVERY * EVERY + FIRST);
    STORE(least->ns, 0);
    STORE(least->launches, 0);
    STORE(least->unpaid, 0);
    STORE(least->measurements, 0);
    STORE(least->timed, 0);
    STORE(least->what, what);
    return least;
}

struct estimate *estimate_of(enum gate_kind kind, void *what)
{
    if (__builtin_expect(!estimates || !what, 0))
        return NULL;
    uint64_t mixed = (uint64_t)(uintptr_t)what * UINT64_C(0x9e3779b97f4a7c15);
    struct estimate *set = estimates->estimate[mixed >> 56 & (SETS - 1)];

    for (int i = 0; i < WAYS; i++)
        if (LOAD(set[i].what) == what)
            return &set[i];
    struct estimate *made = NULL;

    for (int i = 0; i < WAYS && !made; i++) {
        void *free = NULL;

        if (__atomic_compare_exchange_n(&set[i].what, &free, what, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED) || free == what)
            made = &set[i];
    }
    if (!made)
        made = replaced(set, what);
    STORE(made->spared, is_spared(kind, what));
    return made;
}

uint64_t estimate_ns(struct estimate *estimate)
{
    uint64_t ns = estimate ? LOAD(estimate->ns) : 0;

    if (ns > 0)
        return ns;
    if (estimate)
        __atomic_fetch_add(&estimate->unpaid, 1, __ATOMIC_RELAXED);
    return UNKNOWN;
}

bool estimate_is_spared(const struct estimate *estimate)
{
    return estimate && LOAD(estimate->spared);
}

bool estimate_is_due(const struct estimate *estimate)
{
    return estimate && LOAD(estimate->ns) == 0 && LOAD(estimate->launches) >= FIRST &&
           LOAD(estimate->timed) > 0;
}

/* ---- measuring --------------------------------------------------------------------------- */

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

void estimate_begin(struct gate_launch *launch)
{
    struct estimate *estimate = launch->estimate;

    if (!estimate)
        return;
    /* Two threads may count one launch: that only shifts which one is timed. */
    uint32_t launches = LOAD(estimate->launches);

    STORE(estimate->launches, launches + 1);
    if ((launches >= FIRST && launches % EVERY != 0) || LOAD(estimates->running) >= TIMINGS ||
        !can_time())
        return;
    int mode = begin_own_calls();
    void *start = NULL;

    if (driver.cuEventCreate(&start, 0) == CU_SUCCESS) {
        if (driver.cuEventRecord(start, launch->stream) == CU_SUCCESS)
            launch->start = start;
        else
            destroy(start);
    }
    end_own_calls(mode);
}

static struct timing *free_timing(void)
{
    for (int i = 0; i < TIMINGS; i++) {
        int free = TIMING_FREE;

        if (__atomic_compare_exchange_n(&estimates->timing[i].state, &free, TIMING_FILLED_IN, false,
                                        __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            __atomic_fetch_add(&estimates->running, 1, __ATOMIC_RELAXED);
            return &estimates->timing[i];
        }
    }
    return NULL;
}

static void free_again(struct timing *timing)
{
    __atomic_fetch_sub(&estimates->running, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&timing->state, TIMING_FREE, __ATOMIC_RELEASE);
}

void gate_timed(struct gate_launch *launch, int result)
{
    struct timing *timing = result == CU_SUCCESS ? free_timing() : NULL;
    int mode = begin_own_calls();
    void *end = NULL;

    if (timing && driver.cuEventCreate(&end, 0) == CU_SUCCESS &&
        driver.cuEventRecord(end, launch->stream) == CU_SUCCESS) {
        timing->start = launch->start;
        timing->end = end;
        timing->estimate = launch->estimate;
        timing->what = launch->what;
        timing->limit = launch->limit;
        timing->gpu = launch->gpu;
        if (LOAD(launch->estimate->what) == launch->what)
            __atomic_fetch_add(&launch->estimate->timed, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&timing->state, TIMING_RUNS, __ATOMIC_RELEASE);
    } else {
        destroy(launch->start);
        destroy(end);
        if (timing)
            free_again(timing);
    }
    end_own_calls(mode);
    launch->start = NULL;
}

static int by_size(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

static uint64_t lower_quartile(const struct estimate *estimate)
{
    uint32_t sorted[MEASUREMENTS];
    size_t count = estimate->measurements < MEASUREMENTS ? estimate->measurements : MEASUREMENTS;

    memcpy(sorted, estimate->measured, sizeof sorted);
    qsort(sorted, count, sizeof *sorted, by_size);
    return (uint64_t)sorted[(count - 1) / 4] * UNIT;
}

/* One measurement more. Nothing is estimated of the first one alone: the driver may have loaded
   the function's code between its events. What was launched until then is paid for now, since a
   queue of long kernels may be among it. */
static void measured(const struct timing *timing, uint64_t ns)
{
    struct estimate *estimate = timing->estimate;
    uint64_t before = LOAD(estimate->ns);
    bool full = estimate->measurements >= MEASUREMENTS;

    estimate->measured[estimate->measurements % MEASUREMENTS] = (uint32_t)(ns / UNIT);
    estimate->measurements = estimate->measurements < 2 * MEASUREMENTS - 1
                                 ? estimate->measurements + 1
                                 : MEASUREMENTS; /* which stands for the same place, and for full */
    uint64_t quartile = lower_quartile(estimate);

    if (estimate->measurements < 2)
        return;
    if (full) {
        int64_t towards = (int64_t)(quartile < 4 * before ? quartile : 4 * before);

        quartile = (uint64_t)((int64_t)before + (towards - (int64_t)before) / 8);
    }
    STORE(estimate->ns, quartile);
    if (before == 0) {
        uint64_t unpaid = __atomic_exchange_n(&estimate->unpaid, 0, __ATOMIC_RELAXED);

        if (quartile > UNKNOWN)
            gate_charge(timing->limit, timing->gpu,
                        unpaid < LONGEST / (quartile - UNKNOWN) ? unpaid * (quartile - UNKNOWN)
                                                                : LONGEST);
    }
}

static void end(struct timing *timing)
{
    destroy(timing->start);
    destroy(timing->end);
    if (LOAD(timing->estimate->what) == timing->what && LOAD(timing->estimate->timed) > 0)
        __atomic_fetch_sub(&timing->estimate->timed, 1, __ATOMIC_RELAXED);
    free_again(timing);
}

/* A timing whose launch is done, or failed: take it. */
static void look_at(struct timing *timing)
{
    float milliseconds = 0;
    int result = driver.cuEventQuery(timing->end);

    if (result == CU_NOT_READY)
        return;
    if (result == CU_SUCCESS && LOAD(timing->estimate->what) == timing->what &&
        driver.cuEventElapsedTime(&milliseconds, timing->start, timing->end) == CU_SUCCESS &&
        milliseconds >= 0) {
        double ns = (double)milliseconds * 1e6;

        measured(timing, ns < SHORTEST ? SHORTEST : ns > (double)LONGEST ? LONGEST : (uint64_t)ns);
    }
    end(timing);
}

static bool lock(void)
{
    return __atomic_exchange_n(&estimates->lock, 1, __ATOMIC_ACQUIRE) == 0;
}

static void unlock(void)
{
    __atomic_store_n(&estimates->lock, 0, __ATOMIC_RELEASE);
}

void estimates_update(uint64_t now)
{
    if (!estimates || LOAD(estimates->running) == 0 || now < LOAD(estimates->looks_at) || !lock())
        return;
    int mode = begin_own_calls();

    for (int i = 0; i < TIMINGS; i++)
        if (__atomic_load_n(&estimates->timing[i].state, __ATOMIC_ACQUIRE) == TIMING_RUNS)
            look_at(&estimates->timing[i]);
    end_own_calls(mode);
    STORE(estimates->looks_at, now + LOOK_EVERY);
    unlock();
}

void gate_forget_events(void)
{
    if (!estimates || LOAD(estimates->running) == 0)
        return;
    while (!lock())
        sched_yield();
    int mode = begin_own_calls();

    for (int i = 0; i < TIMINGS; i++) {
        struct timing *timing = &estimates->timing[i];

        if (__atomic_load_n(&timing->state, __ATOMIC_ACQUIRE) == TIMING_RUNS)
            end(timing);
    }
    end_own_calls(mode);
    unlock();
}
