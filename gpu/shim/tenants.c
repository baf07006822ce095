/* What the group is, and the counters that are no account of memory. */
#include <string.h>

#include "group.h"
#include "process.h"
#include "say.h"

unsigned group_gpus(void)
{
    if (!process || !limits_file)
        return 0;
    return limits_file->gpus <= PF_GPUS ? limits_file->gpus : PF_GPUS;
}

int group_gpu(const uint8_t uuid[16])
{
    for (unsigned gpu = 0; gpu < group_gpus(); gpu++)
        if (memcmp(limits_file->gpu[gpu].uuid, uuid, 16) == 0)
            return (int)gpu;
    return GROUP_NO_GPU;
}

void group_denied(int gpu)
{
    if (gpu < 0 || gpu >= (int)group_gpus() || !region_lock())
        return;
    region->gpu[gpu].denied++;
    region_unlock();
}

void group_count_import(int gpu)
{
    if (gpu < 0 || gpu >= (int)group_gpus() || !region_lock())
        return;
    region->gpu[gpu].external_imports++;
    region_unlock();
}

bool group_has_process(uint32_t pid)
{
    bool found = false;

    if (!region_lock())
        return false;
    for (unsigned i = 0; i < PF_SLOTS && !found; i++) {
        const struct pf_slot *slot = &region->slot[i];
        const struct pf_process *known = &limits_file->process[i];

        found = slot->state == PF_SLOT_USED &&
                (slot->pid == pid || (known->registration == slot->registration &&
                                      known->registration != 0 && known->host_pid == pid));
    }
    region_unlock();
    return found;
}

struct pf_gpu *group_launches(int gpu)
{
    if (!region || gpu < 0 || gpu >= PF_GPUS)
        return NULL;
    return &region->gpu[gpu];
}
