/*
 * What the shim knows in this process. All of it lies in one mapping that the kernel empties in the
 * child of a fork (MADV_WIPEONFORK): a child starts without slot and allocations, whether fork(3)
 * or a bare system call made it, and its parent's locks are open.
 */
#ifndef PODFABRIC_GPU_PROCESS_H
#define PODFABRIC_GPU_PROCESS_H

#include <pthread.h>
#include <stdatomic.h>

#include "layout.h"
#include "table.h"

enum joined { JOINED_NOT = 0, JOINED_LOOKS, JOINED, JOIN_FAILED };

/* What `limits` says of the group. */
struct limits {
    uint64_t sequence; /* 0: not read yet */
    struct pf_gpu_limit gpu;
};

struct process {
    pthread_mutex_t join_lock; /* joining; within it the region's is taken */
    pthread_mutex_t graph_lock; /* while memory of graphs grows or goes; within it `lock` is taken */
    pthread_mutex_t lock;      /* contexts, pools, graphs; within it the region's and join_lock are taken */
    atomic_int joined;    /* enum joined */
    bool complained;
    atomic_bool lock_is_stuck; /* the region's, when it was last waited for */

    /* Who this is, as a slot tells it. */
    uint32_t pid;
    uint64_t pid_namespace, start_time, image;

    uint32_t slot;
    uint64_t registration;
    uint64_t data_bytes; /* what the slot must say; under the region's mutex */

    _Atomic int64_t owed; /* to data_bytes, since the lock was not to be had */

    struct limits limits; /* a copy, under the region's mutex */

    atomic_int device;        /* the group's GPU as the driver numbers it, + 1; 0: not seen yet */
    unsigned primary;         /* how often its primary context is retained; under `lock` */
    void *primary_context;
    unsigned contexts;        /* how many there are; under `lock` */
    uint64_t pool_granule;    /* what a pool grows by, as far as seen; under `lock` */
    uint64_t graph_bytes;     /* charged for memory of graphs; under `lock`, */
    uint64_t graph_growing;   /* and beside that for launches that are not done */
    atomic_bool graph_allocates; /* a graph has a node that allocates */

    struct table table;
};

/* NULL only where the kernel has no MADV_WIPEONFORK (before 4.14). */
extern struct process *process;

/* Tell why nothing works: once in a process. */
#define COMPLAIN(...) (process->complained ? (void)0 : (process->complained = true, say(__VA_ARGS__)))

/* The files, which a fork shares. */
extern const struct pf_limits *limits_file;
extern struct pf_region *region;

/* The sequence number of `limits`, for who reads there; 0 while the agent writes. Then what was read is
   whole if the limits are still the same. */
static inline uint64_t limits_stable(void)
{
    uint64_t sequence = __atomic_load_n(&limits_file->sequence, __ATOMIC_ACQUIRE);

    return sequence % 2 == 0 ? sequence : 0;
}

static inline bool limits_are_still(uint64_t sequence)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&limits_file->sequence, __ATOMIC_RELAXED) == sequence;
}

/* A step at which tests kill the process. */
#ifdef PF_STEPS
void pf_step(const char *name) __attribute__((weak));
#define STEP(NAME) (pf_step ? pf_step(NAME) : (void)0)
#else
#define STEP(NAME) ((void)0)
#endif

/* files.c */
bool files_open(void);
bool files_read_limits(struct limits *copy);

/* slots.c. All but process_identify under the region's mutex. */
void process_identify(void);
void slots_recompute(void);
bool slots_reap(void);
bool slot_take(void);
bool slot_is_ours(void);
bool slot_counts(void);

/* agent.c. The first: 0, an errno, or a status of the agent as -enum pf_status. */
int agent_register(uint32_t slot, struct pf_answer *answer);
bool agent_runs(void);

/* group.c */
bool region_lock(void);
void region_unlock(void);

#endif
