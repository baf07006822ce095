/* The processes on a GPU: their memory, and their part of its time. */
#include "nvml.h"

#include <string.h>
#include <time.h>

enum { NO_INSTANCE = -1 };

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

struct utilization {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, memory, encoder, decoder;
};

/* The processes with a context on a GPU. Needs the ledger's lock. */
static unsigned processes_on(unsigned gpu, struct process found[MOST_SLOTS])
{
    unsigned count = 0;
    ledger_reap();
    for (unsigned slot = 0; slot < ledger->slots_used; slot++) {
        const struct use *use = &ledger->slots[slot].gpus[gpu];
        if (ledger->slots[slot].taken && (use->contexts > 0 || ledger_held(use) > 0))
            found[count++] = (struct process){ledger_pid(slot), ledger_held(use),
                                                 (unsigned)NO_INSTANCE, (unsigned)NO_INSTANCE};
    }
    return count;
}

static unsigned processes_in(const char *list, unsigned gpu, struct process found[MOST_SLOTS])
{
    if (strcmp(list, node_get()->listed) != 0)
        return 0;
    ledger_lock();
    unsigned number = processes_on(gpu, found);
    ledger_unlock();
    return number;
}

/* Fill the caller's room, or return the needed size. */
static nvmlReturn running(unsigned gpu, const char *list, unsigned *count, struct process *processes)
{
    struct process found[MOST_SLOTS];
    if (count == NULL)
        return NVML_INVALID_ARGUMENT;
    unsigned number = processes_in(list, gpu, found), room = *count;
    *count = number;
    if (number > room)
        return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < number && processes != NULL; i++)
        processes[i] = found[i];
    return NVML_SUCCESS;
}

#define RUNNING(kind, list)                                                                        \
    PUBLIC nvmlReturn nvmlDeviceGet##kind##RunningProcesses_v3(nvmlDevice device, unsigned *count, \
                                                               struct process *processes)          \
    {                                                                                              \
        NVML_GPU(device);                                                                          \
        return running(gpu, list, count, processes);                                               \
    }

RUNNING(Compute, "compute")
RUNNING(Graphics, "graphics")
RUNNING(MPSCompute, "mps")

/* The node's clock at `ns` as NVML writes it: microseconds since 1970. */
static uint64_t microseconds(uint64_t ns)
{
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    uint64_t now = (uint64_t)real.tv_sec * 1000000000 + (uint64_t)real.tv_nsec;
    return (now - ledger_now() + ns) / 1000;
}

/* The newest period with a visible sample; -1: none yet. */
static int64_t newest_period(void)
{
    return (int64_t)(ledger_now() / ledger->sample_ns) - 1;
}

/* A process' mean use since `last_seen_us`, or of all kept periods, and the end of the last period
 * in which it used the GPU; 0 if it did not use it. A real driver attributes a whole period to one
 * process (docs/developers/gpu-library.md). */
static int sample_of(const struct use *use, unsigned pid, uint64_t last_seen_us,
                     struct utilization *found)
{
    const uint64_t length = ledger->sample_ns;
    const int64_t newest = newest_period();
    uint64_t busy = 0, last = 0;
    int64_t count = 0;
    for (int64_t period = newest; period >= 0 && period > newest - SAMPLES; period--) {
        const struct sample *one = &use->samples[period % SAMPLES];
        uint64_t end = microseconds((uint64_t)(period + 1) * length);
        if (end <= last_seen_us + length / 2000) /* the two clocks differ slightly */
            break;
        count++;
        if (one->busy == 0 || (int64_t)one->period != period)
            continue;
        busy += one->busy;
        last = last > 0 ? last : end;
    }
    if (last == 0)
        return 0;
    uint64_t all = (uint64_t)count * length;
    unsigned percent = (unsigned)((busy * 100 + all / 2) / all);
    *found = (struct utilization){.pid = pid, .time_us = last, .sm = percent < 100 ? percent : 100};
    return 1;
}

static unsigned samples_on(unsigned gpu, uint64_t last_seen_us, struct utilization found[MOST_SLOTS])
{
    unsigned count = 0;
    ledger_lock();
    queue_advance(gpu);
    ledger_reap();
    for (unsigned slot = 0; slot < ledger->slots_used; slot++)
        if (ledger->slots[slot].taken)
            count += (unsigned)sample_of(&ledger->slots[slot].gpus[gpu], ledger_pid(slot), last_seen_us,
                                         &found[count]);
    ledger_unlock();
    return count;
}

PUBLIC nvmlReturn nvmlDeviceGetProcessUtilization(nvmlDevice device, struct utilization *samples,
                                                  unsigned *count, unsigned long long last_seen_us)
{
    struct utilization found[MOST_SLOTS];
    NVML_GPU(device);
    if (count == NULL)
        return NVML_INVALID_ARGUMENT;
    unsigned number = samples_on(gpu, last_seen_us, found), room = *count;
    *count = number;
    if (number == 0)
        return NVML_NOT_FOUND;
    if (samples == NULL || number > room)
        return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < number; i++)
        samples[i] = found[i];
    return NVML_SUCCESS;
}
