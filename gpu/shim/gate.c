#define _GNU_SOURCE
#include "gate.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "devices.h"
#include "estimates.h"

#define SPIN_NS UINT64_C(30000)                    /* less is not slept: waking takes longer */
#define PIECE_NS UINT64_C(100000000)               /* between two looks at the share, at most */
#define RECENT_NS UINT64_C(30000000000)            /* for which pf_gpu.longest_ns counts */
#define MOST_NS UINT64_C(3600000000000)            /* of burst and debt, so that no sum overflows */
#define PATIENCE_NS UINT64_C(1000000000)           /* for a function's first measurement */
#define LOOK_NS UINT64_C(5000000)                  /* between two looks for it, at most */
#define KAPPA_ONE UINT64_C(0x10000)
#define LEAST_KAPPA (KAPPA_ONE / 16)
#define MOST_KAPPA (KAPPA_ONE * 16)

#define LOAD(PLACE) __atomic_load_n(&(PLACE), __ATOMIC_RELAXED)
#define STORE(PLACE, VALUE) __atomic_store_n(&(PLACE), (VALUE), __ATOMIC_RELAXED)
#define ADD(PLACE, VALUE) __atomic_fetch_add(&(PLACE), (VALUE), __ATOMIC_RELAXED)

static bool swap(uint64_t *place, uint64_t expected, uint64_t value)
{
    return __atomic_compare_exchange_n(place, &expected, value, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

static uint64_t within(uint64_t value, uint64_t least, uint64_t most)
{
    return value < least ? least : value > most ? most : value;
}

#ifndef PF_CLOCK /* a test has a clock of its own */
uint64_t gate_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The system call, since the function of the C library is a point where a thread can be cancelled.
   A signal ends it early. */
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

/* ---- the group's account ----------------------------------------------------------------- */

/* What GPU time costs in `tat`. */
static uint64_t price(const struct pf_gpu_limit *limit, uint64_t gpu_ns, uint64_t share)
{
    uint64_t kappa = within(LOAD(limit->kappa), LEAST_KAPPA, MOST_KAPPA);

    return (gpu_ns * kappa / KAPPA_ONE) * GATE_WHOLE / share;
}

static uint64_t share_of(const struct pf_gpu_limit *limit)
{
    return within(LOAD(limit->share), 1, GATE_WHOLE);
}

/* The latest that `tat` can be. A later one is of another clock, or of a cap that was lowered. */
static uint64_t latest(const struct pf_gpu_limit *limit, uint64_t now)
{
    return now + within(LOAD(limit->most_debt_ns), 0, MOST_NS);
}

/* A group that launched nothing for a while may use a burst at once, and no more. */
static uint64_t not_before(const struct pf_gpu_limit *limit, uint64_t now)
{
    uint64_t burst = within(LOAD(limit->burst_ns), 0, MOST_NS);

    return now > burst ? now - burst : 0;
}

/* Debt is GPU time divided by the share: another share makes it shorter or longer. The thread that
   notes the new share converts it; if it is killed between the two, that debt stays as it was. */
static void follow_share(struct pf_gpu *gpu, uint64_t share, uint64_t now)
{
    uint64_t before = LOAD(gpu->tat_share);

    if (before == share || !swap(&gpu->tat_share, before, share) || before == 0 ||
        before > GATE_WHOLE)
        return;
    for (;;) {
        uint64_t tat = LOAD(gpu->tat);

        if (tat <= now)
            return;
        uint64_t debt = within(tat - now, 0, MOST_NS);

        if (swap(&gpu->tat, tat, now + debt * before / share))
            return;
    }
}

/* Pay for a launch. 0: done; else when it may be tried again. */
static uint64_t pay(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns,
                    uint64_t now, bool at_once)
{
    uint64_t share = share_of(limit);

    if (share == GATE_WHOLE)
        return 0;
    follow_share(gpu, share, now);
    for (;;) {
        uint64_t tat = LOAD(gpu->tat);
        uint64_t last = latest(limit, now);

        if (tat > last) {
            swap(&gpu->tat, tat, last);
            continue;
        }
        uint64_t base = within(tat, not_before(limit, now), last);

        if (base > now && !at_once)
            return base;
        if (swap(&gpu->tat, tat, within(base + price(limit, gpu_ns, share), 0, last)))
            return 0;
    }
}

void gate_charge(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns)
{
    pay(limit, gpu, gpu_ns, gate_now(), true);
}

/* ---- waiting ----------------------------------------------------------------------------- */

/* Wait for `then`, or a piece of that. */
static void wait_for(uint64_t then, uint64_t now)
{
    if (then - now < SPIN_NS)
        spin_until(then);
    else
        sleep_until(then - now < PIECE_NS ? then : now + PIECE_NS);
}

/* Pay, and wait before that until the group may. What was waited is counted piece by piece: the
   agent looks at it meanwhile. */
static void wait_and_pay(const struct pf_gpu_limit *limit, struct pf_gpu *gpu, uint64_t gpu_ns,
                         uint64_t now)
{
    bool waited = false;

    for (;;) {
        uint64_t then = pay(limit, gpu, gpu_ns, now, false);

        if (then == 0)
            break;
        STORE(gpu->backlogged_at, now);
        wait_for(then, now);
        uint64_t later = gate_now();

        ADD(gpu->wait_ns, later > now ? later - now : 0);
        now = later;
        waited = true;
        estimates_update(now);
    }
    if (waited)
        ADD(gpu->throttled, 1);
}

/* Wait until the first launches of a function are measured, for a while; returns the time. */
static uint64_t wait_for_estimate(const struct pf_gpu_limit *limit, const struct estimate *estimate,
                                  uint64_t now)
{
    uint64_t began = now;

    while (estimate_is_due(estimate) && now - began < PATIENCE_NS && share_of(limit) < GATE_WHOLE) {
        sleep_until(now + within((now - began) / 4, SPIN_NS, LOOK_NS));
        now = gate_now();
        estimates_update(now);
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
    /* It becomes a node of a graph, which pays when it is launched. */
    if (is_capturing(launch->stream))
        return;
    uint64_t now = gate_now();

    estimates_update(now);
    launch->estimate = estimate_of(launch->kind, launch->what);
    bool spared = estimate_is_spared(launch->estimate);

    if (!spared)
        now = wait_for_estimate(launch->limit, launch->estimate, now);
    uint64_t gpu_ns = estimate_ns(launch->estimate);

    note_longest(launch->gpu, gpu_ns, now);
    if (spared)
        pay(launch->limit, launch->gpu, gpu_ns, now, true);
    else
        wait_and_pay(launch->limit, launch->gpu, gpu_ns, now);
    estimate_begin(launch);
}
