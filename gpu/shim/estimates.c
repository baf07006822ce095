/* Estimates of the GPU time of kernels and graphs, from the measured times of earlier launches. */
#define _GNU_SOURCE
#include "gate.h"

#include <stdlib.h>
#include <string.h>

#include "devices.h"
#include "driver.h"
#include "forks.h"

enum {
    WAYS = 8,   /* entries per set */
    SETS = 256, /* a power of two */
    MEASUREMENTS = 8,
    FIRST = 4,       /* the first launches of a function, all timed */
    EVERY = 256,     /* later one of EVERY launches is timed */
    UNIT = 16,       /* of a measurement, ns */
    UNKNOWN = 20000, /* ns; the estimate before two measurements */
    SHORTEST = 500,  /* ns; the resolution of events */
};

#define LONGEST UINT64_C(60000000000) /* ns */

struct estimate {
    void *what;        /* NULL: unused */
    uint64_t ns;       /* 0: not measured yet */
    uint32_t launches; /* wraps */
    uint32_t unpaid;   /* launches that paid for UNKNOWN */
    uint32_t measured[MEASUREMENTS]; /* in units; written by one thread at a time, like `measurements` */
    uint16_t measurements;
    uint16_t timed; /* running timings */
    bool spared;
} __attribute__((aligned(64)));

_Static_assert(sizeof(struct estimate) == 64, "one cache line");

static struct estimate (*estimates)[WAYS]; /* by set */

__attribute__((constructor)) static void make_estimates(void)
{
    estimates = zero_after_fork(SETS * sizeof *estimates);
}

/* A C++ name begins with its length: _Z27ncclDevKernel_AllReduce… */
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

/* Reuse the least launched entry of a set. The counts of the other entries are halved, so that unused
   entries age. Threads that still use the old entry spoil at most one measurement. */
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
    struct estimate *set = estimates[mixed >> 56 & (SETS - 1)];

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

uint64_t estimate_ns(const struct estimate *estimate)
{
    uint64_t ns = estimate ? LOAD(estimate->ns) : 0;

    return ns > 0 ? ns : UNKNOWN;
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

bool estimate_counts(struct estimate *estimate)
{
    if (!estimate)
        return false;
    /* If two threads count one launch, only the choice of the timed launch shifts. */
    uint32_t launches = LOAD(estimate->launches);

    STORE(estimate->launches, launches + 1);
    if (LOAD(estimate->ns) == 0)
        __atomic_fetch_add(&estimate->unpaid, 1, __ATOMIC_RELAXED);
    return launches < FIRST || launches % EVERY == 0;
}

void estimate_timing_begins(struct estimate *estimate, const void *what)
{
    if (estimate && LOAD(estimate->what) == what)
        __atomic_fetch_add(&estimate->timed, 1, __ATOMIC_RELAXED);
}

void estimate_timing_ends(struct estimate *estimate, const void *what)
{
    if (estimate && LOAD(estimate->what) == what && LOAD(estimate->timed) > 0)
        __atomic_fetch_sub(&estimate->timed, 1, __ATOMIC_RELAXED);
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

/* The GPU time of launches that paid for UNKNOWN, beyond UNKNOWN. */
static uint64_t unpaid(struct estimate *estimate, uint64_t ns)
{
    uint64_t launches = __atomic_exchange_n(&estimate->unpaid, 0, __ATOMIC_RELAXED);

    if (ns <= UNKNOWN)
        return 0;
    return launches < LONGEST / (ns - UNKNOWN) ? launches * (ns - UNKNOWN) : LONGEST;
}

/* The first measurement alone gives no estimate: the driver may have loaded code between its events. */
uint64_t estimate_measured(struct estimate *estimate, const void *what, uint64_t ns)
{
    if (!estimate || LOAD(estimate->what) != what)
        return 0;
    ns = ns < SHORTEST ? SHORTEST : ns > LONGEST ? LONGEST : ns;
    uint64_t before = LOAD(estimate->ns);
    bool full = estimate->measurements >= MEASUREMENTS;

    estimate->measured[estimate->measurements % MEASUREMENTS] = (uint32_t)(ns / UNIT);
    estimate->measurements = estimate->measurements < 2 * MEASUREMENTS - 1
                                 ? estimate->measurements + 1
                                 : MEASUREMENTS; /* the same place, and still full */
    uint64_t quartile = lower_quartile(estimate);

    if (estimate->measurements < 2)
        return 0;
    if (full) {
        int64_t towards = (int64_t)(quartile < 4 * before ? quartile : 4 * before);

        quartile = (uint64_t)((int64_t)before + (towards - (int64_t)before) / 8);
    }
    STORE(estimate->ns, quartile);
    return before == 0 ? unpaid(estimate, quartile) : 0;
}
