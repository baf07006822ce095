/* The slots of a group's processes in `region`. The callers have its mutex. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#include "process.h"
#include "say.h"

enum { SUMS = 10 }; /* attempts while the agent writes */
enum { FIELD_STATE = 3, FIELD_THREADS = 20, FIELD_START = 22 }; /* of /proc/PID/stat, proc(5) */

struct stat_fields {
    char state;
    unsigned long long threads, start_time;
};

/* False: the process does not exist, or is hidden (hidepid). */
static bool read_stat(const char *path, struct stat_fields *fields)
{
    char text[1024];
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);

    if (descriptor < 0)
        return false;
    ssize_t length = read(descriptor, text, sizeof text - 1);

    close(descriptor);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char *at = strrchr(text, ')'); /* the name may have any character */

    if (!at || at[1] != ' ' || !at[2])
        return false;
    fields->state = at[2];
    at += 2;
    for (int field = FIELD_STATE; field < FIELD_START; field++) {
        at = strchr(at, ' ');
        if (!at)
            return false;
        at++;
        if (field + 1 == FIELD_THREADS)
            fields->threads = strtoull(at, NULL, 10);
    }
    fields->start_time = strtoull(at, NULL, 10);
    return true;
}

void process_identify(void)
{
    char link[64] = "";
    struct stat_fields fields = {0};
    const uint64_t *random = (const uint64_t *)getauxval(AT_RANDOM);
    ssize_t length = readlink("/proc/self/ns/pid", link, sizeof link - 1);

    process->pid = (uint32_t)getpid();
    process->pid_namespace = length > 5 ? strtoull(link + 5, NULL, 10) : 0; /* "pid:[4026531836]" */
    if (read_stat("/proc/self/stat", &fields))
        process->start_time = fields.start_time;
    /* The kernel gives each executed program 16 random bytes. The C library derives secrets from them,
       so only 32 bits of a mix leave this process. */
    uint64_t mixed = random ? (random[0] ^ random[1]) * UINT64_C(0x9e3779b97f4a7c15) : 0;

    process->image = mixed >> 32 | UINT64_C(1) << 32;
}

static uint64_t add(uint64_t left, uint64_t right)
{
    return left + right < left ? UINT64_MAX : left + right;
}

static uint64_t bytes_of(const struct pf_slot *slot, const struct pf_process *known)
{
    bool measured = known->registration == slot->registration && known->registration != 0 &&
                    known->overhead_bytes != PF_NOT_MEASURED;

    return add(slot->data_bytes, measured ? known->overhead_bytes : slot->context_bytes);
}

static void free_slot(struct pf_slot *slot)
{
    slot->state = PF_SLOT_FREE; /* first: after a kill here the slot does not count */
    STEP("slot freed");
    memset(slot, 0, sizeof *slot);
}

static uint64_t sum_slots(bool dead[PF_SLOTS])
{
    uint64_t used = 0;

    for (unsigned i = 0; i < PF_SLOTS; i++) {
        const struct pf_slot *slot = &region->slot[i];
        const struct pf_process *known = &limits_file->process[i];

        dead[i] = false;
        if (slot->state != PF_SLOT_USED)
            continue;
        dead[i] = known->state == PF_PROCESS_DEAD && slot->registration != 0 &&
                  known->registration == slot->registration;
        if (!dead[i])
            used = add(used, bytes_of(slot, known));
    }
    return used;
}

/* If the agent writes all the time, or died while it wrote, the present entries count: the
   agent writes an entry at once. The next call tries again. */
void slots_recompute(void)
{
    uint64_t used, sequence;
    bool dead[PF_SLOTS];
    int tries = SUMS;

    do {
        sequence = limits_stable();
        used = sum_slots(dead);
    } while ((sequence == 0 || !limits_are_still(sequence)) && --tries > 0);
    for (unsigned i = 0; i < PF_SLOTS; i++)
        if (dead[i]) {
            free_slot(&region->slot[i]);
            region->stale_slots++;
        }
    region->gpu.used_bytes = used;
    STEP("used recomputed");
    if (used > region->gpu.peak_bytes)
        region->gpu.peak_bytes = used;
    region->applied = tries > 0 ? sequence : 0;
}

static unsigned free_slots(bool (*is_old)(const struct pf_slot *slot))
{
    unsigned freed = 0;

    for (unsigned i = 0; i < PF_SLOTS; i++)
        if (region->slot[i].state == PF_SLOT_USED && is_old(&region->slot[i])) {
            free_slot(&region->slot[i]);
            freed++;
        }
    if (freed > 0)
        slots_recompute();
    return freed;
}

/* Whether the process of a slot has ended; false in another pid namespace, where it is not visible. */
static bool is_dead(const struct pf_slot *slot)
{
    char path[40];
    struct stat_fields fields;

    if (slot->pid_namespace != process->pid_namespace || slot->pid == 0 || slot->pid == process->pid)
        return false;
    if (kill((pid_t)slot->pid, 0) != 0 && errno == ESRCH)
        return true;
    snprintf(path, sizeof path, "/proc/%u/stat", slot->pid);
    if (!read_stat(path, &fields))
        return false;
    if (fields.start_time != slot->start_time)
        return true;
    /* A zombie has no memory, unless its other threads still run. */
    return fields.state == 'Z' && fields.threads <= 1;
}

bool slots_reap(void)
{
    unsigned freed = free_slots(is_dead);

    region->stale_slots += freed;
    return freed > 0;
}

/* Whether an earlier program in this process had the slot, or this copy of the shim. Another thread
   may just have replaced a lost slot, and the memory counts once. */
static bool is_earlier(const struct pf_slot *slot)
{
    return slot->pid_namespace == process->pid_namespace && slot->pid == process->pid &&
           (slot->image != process->image || slot->instance == (uintptr_t)&process);
}

static int free_index(void)
{
    for (unsigned i = 0; i < PF_SLOTS; i++)
        if (region->slot[i].state == PF_SLOT_FREE)
            return (int)i;
    return -1;
}

bool slot_take(void)
{
    free_slots(is_earlier);
    int index = free_index();

    if (index < 0 && slots_reap())
        index = free_index();
    if (index < 0) {
        region->refused_slots++;
        COMPLAIN("%d processes of this container use a GPU; more are not allowed", PF_SLOTS);
        return false;
    }
    struct pf_slot *slot = &region->slot[index];

    memset(slot, 0, sizeof *slot);
    slot->pid = process->pid;
    slot->pid_namespace = process->pid_namespace;
    slot->start_time = process->start_time;
    slot->image = process->image;
    slot->instance = (uintptr_t)&process;
    slot->data_bytes = process->data_bytes;
    if (process->contexts > 0)
        slot->context_bytes = process->limits.gpu.context_bytes;
    STEP("slot filled");
    slot->state = PF_SLOT_USED;
    STEP("slot taken");
    process->slot = (uint32_t)index;
    process->registration = 0;
    return true;
}

bool slot_counts(void)
{
    return bytes_of(&region->slot[process->slot], &limits_file->process[process->slot]) > 0;
}

bool slot_is_ours(void)
{
    const struct pf_slot *slot = &region->slot[process->slot];

    return slot->state == PF_SLOT_USED && slot->pid == process->pid &&
           slot->registration == process->registration && slot->instance == (uintptr_t)&process &&
           slot->pid_namespace == process->pid_namespace;
}
