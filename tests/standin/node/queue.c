#define _GNU_SOURCE
#include "queue.h"

#include <time.h>

enum { LOOK_FOR_DEAD_NS = 5000000, LONGEST_NAP_NS = 20000000, SHORTEST_NAP_NS = 20000 };

/* Let a process run for at most `ns` from `start` on; returns how long it ran. */
static uint64_t run(struct use *use, uint64_t start, uint64_t ns)
{
    uint64_t at = start;
    while (use->finished < use->pushed) {
        struct work *work = &use->queue[use->finished % QUEUE_LENGTH];
        uint64_t step = start + ns - at < work->left ? start + ns - at : work->left;
        at += step;
        work->left -= step;
        if (work->left > 0)
            break;
        work->end = at;
        use->finished++;
    }
    use->busy += at - start;
    return at - start;
}

/* Add the time from `start` to `end` to the samples of the periods that it touches. */
static void sample(struct use *use, uint64_t start, uint64_t end)
{
    uint64_t length = ledger->sample_ns;
    if (end - start > SAMPLES * length)
        start = end - SAMPLES * length; /* older ones would be overwritten */
    while (start < end) {
        uint64_t period = start / length;
        uint64_t step = (period + 1) * length < end ? (period + 1) * length - start : end - start;
        struct sample *one = &use->samples[period % SAMPLES];
        if (one->period != period)
            *one = (struct sample){.period = period};
        one->busy += step;
        start += step;
    }
}

/* The next slot after `turn` with work on a GPU, `turn` itself last; -1: none has. */
static int next(unsigned gpu, uint32_t turn)
{
    for (unsigned step = 1; step <= ledger->slots_used; step++) {
        unsigned slot = (turn + step) % ledger->slots_used;
        const struct use *use = &ledger->slots[slot].gpus[gpu];
        if (ledger->slots[slot].taken && use->finished < use->pushed)
            return (int)slot;
    }
    return -1;
}

void queue_advance(unsigned gpu)
{
    struct engine *engine = &ledger->engines[gpu];
    uint64_t now = ledger_now();
    if (now - ledger->reaped > LOOK_FOR_DEAD_NS) {
        ledger_reap();
        ledger->reaped = now;
    }
    for (;;) {
        struct use *use = &ledger->slots[engine->turn].gpus[gpu];
        if (engine->turn_left == 0 || !ledger->slots[engine->turn].taken ||
            use->finished == use->pushed) {
            int slot = next(gpu, engine->turn);
            if (slot < 0)
                break;
            engine->turn = (uint32_t)slot;
            engine->turn_left = ledger->slice_ns;
            use = &ledger->slots[slot].gpus[gpu];
        }
        uint64_t most = now > engine->time ? now - engine->time : 0, before = use->finished;
        most = most < engine->turn_left ? most : engine->turn_left;
        uint64_t ran = run(use, engine->time, most);
        sample(use, engine->time, engine->time + ran);
        engine->time += ran;
        engine->turn_left -= ran;
        if (ran == 0 && use->finished == before)
            break; /* its time is in the future */
    }
    if (engine->time < now)
        engine->time = now; /* idle */
}

/* The place for the end of a work whose entry in the queue is reused. */
static struct mark *marks[MOST_GPUS][QUEUE_LENGTH];

static void append(unsigned gpu, struct use *use, uint64_t ns, struct mark *mark)
{
    unsigned place = use->pushed % QUEUE_LENGTH;
    struct mark *old = marks[gpu][place];
    if (old != NULL && old->number + QUEUE_LENGTH == use->pushed + 1)
        old->end = use->queue[place].end; /* otherwise it has been set to later work */
    use->queue[place] = (struct work){.left = ns};
    use->pushed++;
    marks[gpu][place] = mark;
    if (mark != NULL)
        *mark = (struct mark){.number = use->pushed};
}

uint64_t queue_push(unsigned gpu, uint64_t ns, struct mark *mark)
{
    struct use *use = &ledger_own->gpus[gpu];
    for (;;) {
        ledger_lock();
        queue_advance(gpu);
        if (use->pushed - use->finished < QUEUE_LENGTH)
            break;
        uint64_t oldest = use->finished + 1;
        ledger_unlock();
        queue_wait(gpu, oldest);
    }
    append(gpu, use, ns, mark);
    uint64_t number = use->pushed;
    queue_advance(gpu);
    ledger_unlock();
    return number;
}

uint64_t queue_last(unsigned gpu)
{
    return __atomic_load_n(&ledger_own->gpus[gpu].pushed, __ATOMIC_RELAXED);
}

int queue_ended(unsigned gpu, uint64_t number)
{
    ledger_lock();
    queue_advance(gpu);
    int ended = ledger_own->gpus[gpu].finished >= number;
    ledger_unlock();
    return ended;
}

int queue_mark_ended(unsigned gpu, const struct mark *mark, uint64_t *end)
{
    const struct use *use = &ledger_own->gpus[gpu];
    ledger_lock();
    queue_advance(gpu);
    int ended = use->finished >= mark->number;
    if (ended && mark->number + QUEUE_LENGTH > use->pushed && mark->number > 0)
        *end = use->queue[(mark->number - 1) % QUEUE_LENGTH].end;
    else if (ended)
        *end = mark->end;
    ledger_unlock();
    return ended;
}

uint64_t queue_left(const struct use *use, uint64_t number)
{
    uint64_t left = 0;
    for (uint64_t one = use->finished; one < number; one++)
        left += use->queue[one % QUEUE_LENGTH].left;
    return left;
}

/* The minimum duration of that work, without work of other processes. */
static uint64_t soonest(unsigned gpu, uint64_t number)
{
    ledger_lock();
    uint64_t left = queue_left(&ledger_own->gpus[gpu], number);
    ledger_unlock();
    return left;
}

void queue_wait(unsigned gpu, uint64_t number)
{
    while (!queue_ended(gpu, number)) {
        uint64_t nap = soonest(gpu, number);
        if (nap < SHORTEST_NAP_NS)
            nap = SHORTEST_NAP_NS;
        if (nap > LONGEST_NAP_NS)
            nap = LONGEST_NAP_NS;
        nanosleep(&(struct timespec){.tv_nsec = (long)nap}, NULL);
    }
}
