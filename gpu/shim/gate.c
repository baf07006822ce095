/* The gate: a launch waits here until its group may pay for it (gate.h). */
#define _GNU_SOURCE
#include "gate.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "devices.h"

#define SPIN_NS UINT64_C(30000)         /* shorter waits spin: waking up takes longer */
#define PIECE_NS UINT64_C(100000000)    /* the longest sleep before the share is read again */
#define RECENT_NS UINT64_C(30000000000) /* for which pf_gpu.longest_ns counts */
#define MOST_NS UINT64_C(3600000000000) /* of burst and debt, so that no sum overflows */
#define PATIENCE_NS UINT64_C(1000000000) /* for a function's first measurement */
#define LOOK_NS UINT64_C(2000000)       /* the longest pause between two looks at events */
#define LOOKS 32                        /* a pause is at most 1/LOOKS of the wait so far */
#define HELD_NS UINT64_C(200000000)     /* for which a wait shows that the group has work */
#define QUEUE_NS UINT64_C(50000000)     /* the most unfinished work in a stream */
#define LAG_NS UINT64_C(2000000000)     /* by which a group with work may catch up */
#define KAPPA_ONE UINT64_C(0x10000)
#define LEAST_KAPPA (KAPPA_ONE / 16)
#define MOST_KAPPA (KAPPA_ONE * 16)

static bool swap(uint64_t *place, uint64_t expected, uint64_t value)
{
    return __atomic_compare_exchange_n(place, &expected, value, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

static uint64_t within(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

#ifndef PF_CLOCK /* a test has its own clock */
uint64_t gate_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* A system call, since the C library's function is a cancellation point. A signal ends it early. */
static void sleep_until(uint64_t then)
{
    struct timespec time = {.tv_sec = (time_t)(then / 1000000000),
                            .tv_nsec = (long)(then % 1000000000)};

    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static void spin_until(uint64_t then)
{
    while (gate_now() < then)
        for (int i = 0; i < 8; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            __asm__ volatile("yield");
#endif
        }
}
#else
void sleep_until(uint64_t then);
void spin_until(uint64_t then);
#endif

/* The cost of GPU time in `tat`. */
static uint64_t price(const struct pf_gpu_limit *limit, uint64_t gpu_ns, uint64_t share)
{
    uint64_t kappa = within(LOAD(limit->kappa), LEAST_KAPPA, MOST_KAPPA);

    return (gpu_ns * kappa / KAPPA_ONE) * GATE_WHOLE / share;
}

static uint64_t share_of(const struct pf_gpu_limit *limit)
{
    return within(LOAD(limit->share), 1, GATE_WHOLE);
}

/* The latest `tat`. A later one is from another clock, or from before a lower most_debt_ns. */
static uint64_t latest(const struct pf_gpu_limit *limit, uint64_t now)
{
    return now + within(LOAD(limit->most_debt_ns), 0, MOST_NS);
}

/* The earliest base for a payment. A group with unfinished work was delayed by other groups. */
static uint64_t not_before(const struct gate_launch *launch, uint64_t now)
{
    uint64_t held = LOAD(launch->gpu->backlogged_at); /* of any process of the group */
    uint64_t ago = held < now ? now - held : held - now; /* another thread may have waited meanwhile */
    bool works = timings_unfinished(now) || ago < HELD_NS;
    uint64_t before = works ? LAG_NS : within(LOAD(launch->limit->burst_ns), 0, MOST_NS);

    return now > before ? now - before : 0;
}

static void move_tat(struct pf_gpu *gpu, int64_t gpu_ns, uint64_t share)
{
    uint64_t size = within(gpu_ns < 0 ? -(uint64_t)gpu_ns : (uint64_t)gpu_ns, 0, MOST_NS);
    uint64_t moved = size * GATE_WHOLE / share;

    for (;;) {
        uint64_t tat = LOAD(gpu->tat);

        if (swap(&gpu->tat, tat, gpu_ns > 0 ? tat + moved : tat > moved ? tat - moved : 0))
            return;
    }
}

/* The thread that records a settlement applies it. A kill in between loses the settlement. */
static void follow_settled(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t share)
{
    int64_t settled = LOAD(limit->settled_ns), before = LOAD(gpu->settled_ns);

    if (__builtin_expect(settled != before, 0) &&
        __atomic_compare_exchange_n(&gpu->settled_ns, &before, settled, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
        move_tat(gpu, (int64_t)((uint64_t)settled - (uint64_t)before), share);
}

/* Pay for a launch. Returns 0, or the time of the next attempt. */
static uint64_t pay(struct gate_launch *launch, uint64_t earliest, uint64_t now, bool at_once)
{
    const struct pf_gpu_limit *limit = launch->limit;
    struct pf_gpu *gpu = launch->gpu;
    uint64_t share = share_of(limit);

    if (share == GATE_WHOLE) {
        launch->time = (struct gate_time){0};
        return 0;
    }
    follow_settled(limit, gpu, share);
    for (;;) {
        uint64_t tat = LOAD(gpu->tat);
        uint64_t last = latest(limit, now);

        if (tat > last) {
            swap(&gpu->tat, tat, last);
            continue;
        }
        uint64_t base = within(tat, earliest, last);

        if (base > now && !at_once)
            return base;
        uint64_t cost = price(limit, launch->time.ns, share);
        uint64_t until = within(base + cost, 0, last);

        if (swap(&gpu->tat, tat, until)) {
            launch->time.paid_ns = (until - base) * share / GATE_WHOLE;
            ADD(gpu->launched_ns, launch->time.ns);
            ADD(gpu->paid_ns, launch->time.paid_ns);
            return 0;
        }
    }
}

struct gate_time gate_charge(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns)
{
    struct gate_launch before = {.limit = limit, .gpu = gpu, .time.ns = gpu_ns};
    uint64_t now = gate_now();

    pay(&before, now > LAG_NS ? now - LAG_NS : 0, now, true);
    return before.time;
}

static void wait_for(uint64_t then, uint64_t now)
{
    if (then - now < SPIN_NS)
        spin_until(then);
    else
        sleep_until(then - now < PIECE_NS ? then : now + PIECE_NS);
}

/* Count each piece of a wait, since the agent reads the sum meanwhile. Returns the time. */
static uint64_t wait_piece(struct pf_gpu *gpu, uint64_t then, uint64_t now)
{
    STORE(gpu->backlogged_at, now);
    wait_for(then, now);
    uint64_t later = gate_now();

    ADD(gpu->wait_ns, later > now ? later - now : 0);
    timings_update(later);
    return later;
}

static uint64_t wait_and_pay(struct gate_launch *launch, uint64_t earliest, uint64_t now)
{
    uint64_t then;

    while ((then = pay(launch, earliest, now, false)) != 0) {
        now = wait_piece(launch->gpu, then, now);
        launch->time.ns = estimate_ns(launch->estimate);
    }
    return now;
}

/* The wait for earlier launches in the stream must end, because they may depend on this one. */
static uint64_t patience(const struct gate_launch *launch)
{
    uint64_t most = launch->time.ns * (MOST_KAPPA / KAPPA_ONE) * GATE_WHOLE / share_of(launch->limit);

    return within(most, 0, within(LOAD(launch->limit->most_debt_ns), 0, MOST_NS));
}

static bool must_wait_for_others(const struct gate_launch *launch, uint64_t waited)
{
    return share_of(launch->limit) < GATE_WHOLE &&
           ((waited < PATIENCE_NS && estimate_is_due(launch->estimate)) ||
            (waited < patience(launch) && timings_queue(launch->stream, QUEUE_NS)));
}

static uint64_t wait_for_others(struct gate_launch *launch, uint64_t now)
{
    uint64_t began = now;

    while (must_wait_for_others(launch, now - began)) {
        uint64_t piece = within((now - began) / LOOKS, SPIN_NS, LOOK_NS);

        now = wait_piece(launch->gpu, now + piece, now);
        launch->time.ns = estimate_ns(launch->estimate);
    }
    return now;
}

static void note_longest(struct pf_gpu *gpu, uint64_t gpu_ns, uint64_t now)
{
    uint64_t at = LOAD(gpu->longest_at);

    if (gpu_ns > LOAD(gpu->longest_ns) || now - at > RECENT_NS) {
        STORE(gpu->longest_ns, gpu_ns);
        STORE(gpu->longest_at, now);
    }
}

void gate_admit(struct gate_launch *launch)
{
    /* A captured launch becomes a node of a graph, which pays when it is launched. */
    if (is_capturing(launch->stream))
        return;
    uint64_t now = gate_now();

    timings_update(now);
    uint64_t earliest = not_before(launch, now);

    launch->estimate = estimate_of(launch->kind, launch->what);
    launch->time.ns = estimate_ns(launch->estimate);
    bool spared = estimate_is_spared(launch->estimate);
    uint64_t asked = now;

    if (!spared)
        now = wait_for_others(launch, now);
    note_longest(launch->gpu, launch->time.ns, now);
    if (spared)
        pay(launch, earliest, now, true);
    else
        now = wait_and_pay(launch, earliest, now);
    if (now != asked)
        ADD(launch->gpu->throttled, 1);
    timing_begin(launch);
}
