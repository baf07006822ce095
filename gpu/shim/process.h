/* The shim's state in this process. The kernel clears this mapping in the child of a fork
   (MADV_WIPEONFORK), even after a bare system call. So no child has its parent's slot or locks. */
#ifndef PODFABRIC_GPU_PROCESS_H
#define PODFABRIC_GPU_PROCESS_H

#include <pthread.h>
#include <stdatomic.h>

#include "layout.h"
#include "table.h"

enum joined { JOINED_NOT, JOINED, JOIN_FAILED };

struct limits {
    uint64_t sequence; /* of `limits`; 0: not read yet */
    struct pf_gpu_limit gpu;
};

struct process {
    pthread_mutex_t join_lock;  /* for joining; the region's mutex is taken within it */
    pthread_mutex_t graph_lock; /* while memory of graphs grows or shrinks; `lock` is taken within it */
    pthread_mutex_t lock; /* contexts, pools, graphs; the region's mutex and join_lock are taken within it */
    atomic_int joined;    /* enum joined */
    bool complained;
    atomic_bool lock_is_stuck; /* the last wait for the region's mutex timed out */

    /* As in the slot: */
    uint32_t pid;
    uint64_t pid_namespace, start_time, image;

    uint32_t slot;
    uint64_t registration;
    uint64_t data_bytes; /* of the slot; under the region's mutex */

    _Atomic int64_t uncounted; /* bytes to add to data_bytes, since the lock could not be taken */

    struct limits limits; /* a copy, under the region's mutex */

    atomic_int device;        /* the driver's number of the group's GPU, + 1; 0: unknown */
    unsigned primary;         /* times that its primary context is retained; under `lock` */
    void *primary_context;
    unsigned contexts;        /* under `lock` */
    uint64_t pool_granule;    /* the smallest growth of a pool so far; under `lock` */
    uint64_t graph_bytes;     /* counted for memory of graphs; under `lock` */
    uint64_t graph_growing;   /* counted in addition for unfinished launches; under `lock` */
    atomic_bool graph_allocates; /* a graph has a node that allocates */

    struct table table;
};

/* NULL if zero_after_fork failed. */
extern struct process *process;

/* Log an error; only the first one in a process. */
#define COMPLAIN(...) (process->complained ? (void)0 : (process->complained = true, say(__VA_ARGS__)))

/* The mapped files, which a fork shares. */
extern const struct pf_limits *limits_file;
extern struct pf_region *region;

/* 0: the agent is writing. A copy is consistent if limits_are_still returns true after it. */
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

/* A point at which tests kill the process. */
#ifdef PF_STEPS
void pf_step(const char *name) __attribute__((weak));
#define STEP(NAME) (pf_step ? pf_step(NAME) : (void)0)
#else
#define STEP(NAME) ((void)0)
#endif

/* join.c. False: the agent is writing, or died while it wrote. */
bool files_read_limits(struct limits *copy);

/* slots.c: all except process_identify under the region's mutex. */
void process_identify(void);
void slots_recompute(void);
bool slots_reap(void);
bool slot_take(void);
bool slot_is_ours(void);
bool slot_counts(void);

/* group.c */
bool region_lock(void);
void region_unlock(void);

#endif
