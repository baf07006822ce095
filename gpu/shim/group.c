/* Locks `region` and counts the memory of the group's processes. */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "forks.h"
#include "old_glibc.h"
#include "process.h"
#include "say.h"

enum { PIECE_MS = 100 }; /* of a wait for the region's mutex */

struct process *process;

/* Before the other constructors, which need it. */
__attribute__((constructor(101))) static void make_process(void)
{
    process = zero_after_fork(sizeof *process);
    if (!process)
        say("%s: no GPU can be used; the kernel must be Linux 4.14 or later", strerror(errno));
}

/* While the agent writes, the previous limits stay. */
static void refresh_limits(void)
{
    uint64_t sequence = limits_stable();

    if (sequence == 0)
        return;
    if (sequence != process->limits.sequence)
        files_read_limits(&process->limits);
    if (sequence != region->applied)
        slots_recompute();
}

/* A timeout means that the holder is stopped, or that the tenant wrote over the lock. Later waits are
   short then. A wait is in pieces, since the clock may be set. */
static int wait_for_lock(pthread_mutex_t *mutex)
{
    int error = ETIMEDOUT, most = process->lock_is_stuck ? PIECE_MS : PF_PATIENCE_MS;

    for (int waited = 0; error == ETIMEDOUT && waited < most; waited += PIECE_MS) {
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += PIECE_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        error = pthread_mutex_timedlock(mutex, &until);
    }
    process->lock_is_stuck = error == ETIMEDOUT;
    return error;
}

/* On a lock of another kind the C library would wait without end or abort. */
static int lock_mutex(pthread_mutex_t *mutex)
{
    uint32_t kind;

    memcpy(&kind, &region->mutex.bytes[PF_MUTEX_KIND_AT], sizeof kind);
    if (kind != PF_MUTEX_KIND)
        return EINVAL;
    int error = pthread_mutex_trylock(mutex);

    if (error == EBUSY)
        return wait_for_lock(mutex);
    if (process->lock_is_stuck)
        process->lock_is_stuck = false;
    return error;
}

bool region_lock(void)
{
    if (!process || !region)
        return false;
    pthread_mutex_t *mutex = (pthread_mutex_t *)&region->mutex;
    int error = lock_mutex(mutex);

    if (error == EOWNERDEAD) {
        STEP("lock recovered");
        slots_recompute();
        region->lock_recoveries++;
        pthread_mutex_consistent(mutex);
    } else if (error != 0) {
        COMPLAIN(PF_REGION_PATH " was overwritten, or a stopped process keeps it locked: memory "
                 "of GPUs cannot be counted");
        return false;
    }
    STEP("locked");
    refresh_limits();
    return true;
}

void region_unlock(void)
{
    STEP("before unlock");
    pthread_mutex_unlock((pthread_mutex_t *)&region->mutex);
}

static void add(uint64_t bytes)
{
    struct pf_gpu *gpu = &region->gpu;

    region->slot[process->slot].data_bytes += bytes;
    STEP("slot charged");
    process->data_bytes += bytes;
    gpu->used_bytes += bytes;
    if (gpu->used_bytes > gpu->peak_bytes)
        gpu->peak_bytes = gpu->used_bytes;
    STEP("charged");
}

static void subtract(uint64_t bytes)
{
    uint64_t *data = &region->slot[process->slot].data_bytes, *used = &region->gpu.used_bytes;

    bytes = bytes < process->data_bytes ? bytes : process->data_bytes;
    process->data_bytes -= bytes;
    *data -= bytes < *data ? bytes : *data;
    STEP("slot released");
    *used -= bytes < *used ? bytes : *used;
}

static void count_uncounted(void)
{
    if (atomic_load_explicit(&process->uncounted, memory_order_relaxed) == 0)
        return;
    int64_t bytes = atomic_exchange(&process->uncounted, 0);

    if (bytes > 0)
        add((uint64_t)bytes);
    else
        subtract((uint64_t)-bytes);
}

/* The agent may have freed the slot of a process that it took for dead. A tenant can write over it. */
static bool enter(void)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        if (!group_join() || !region_lock())
            return false;
        if (slot_is_ours()) {
            count_uncounted();
            return true;
        }
        region_unlock();
        STEP("slot lost");
        atomic_store(&process->joined, JOINED_NOT);
    }
    return false;
}

static bool fits(uint64_t bytes)
{
    uint64_t limit = process->limits.gpu.memory_bytes, used = region->gpu.used_bytes;

    return used <= limit && bytes <= limit - used;
}

static bool fits_after_reaping(uint64_t bytes)
{
    return fits(bytes) || (slots_reap() && fits(bytes));
}

bool group_charge(uint64_t bytes)
{
    if (!enter())
        return false;
    bool done = fits_after_reaping(bytes);

    if (done)
        add(bytes);
    region_unlock();
    return done;
}

void group_release(uint64_t bytes)
{
    if (bytes == 0)
        return;
    if (!enter()) {
        if (process)
            atomic_fetch_sub(&process->uncounted, (int64_t)bytes);
        return;
    }
    subtract(bytes);
    region_unlock();
}

bool group_replace(uint64_t counted, uint64_t actual)
{
    if (!enter()) {
        if (process)
            atomic_fetch_add(&process->uncounted, (int64_t)(actual - counted));
        return false;
    }
    if (actual > counted)
        add(actual - counted);
    else
        subtract(counted - actual);
    bool within = fits(0);

    region_unlock();
    return within;
}

static void set_context(uint64_t bytes)
{
    region->slot[process->slot].context_bytes = bytes;
    slots_recompute();
}

bool group_charge_context(void)
{
    if (!enter())
        return false;
    uint64_t bytes = process->limits.gpu.context_bytes;
    bool done = fits_after_reaping(bytes);

    if (done)
        set_context(bytes);
    region_unlock();
    return done;
}

void group_release_context(void)
{
    if (!enter())
        return;
    set_context(0);
    region_unlock();
}

struct group_usage group_usage(void)
{
    struct group_usage usage = {0};

    if (!region_lock())
        return usage;
    usage.used_bytes = region->gpu.used_bytes;
    usage.limit_bytes = process->limits.gpu.memory_bytes;
    region_unlock();
    return usage;
}

bool group_has_gpu(const uint8_t uuid[16])
{
    return limits_file && memcmp(limits_file->gpu.uuid, uuid, 16) == 0;
}

void group_denied(void)
{
    if (!region_lock())
        return;
    region->gpu.denied++;
    region_unlock();
}
