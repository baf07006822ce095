/* The contents and work of the simulated node's GPUs, in a file that all its processes map.
 *
 * Each process has a slot, and holds a lock on the slot's byte of the file (an open file
 * description lock, fcntl(2)) while it lives. The kernel drops the lock however the process
 * ends. A slot whose byte can be locked counts nothing, as a driver frees a dead process'
 * memory. Its record lock (F_SETLK) in a second file gives the process' pid in any pid
 * namespace. One robust mutex guards everything else. A process killed inside it leaves its own
 * slot wrong, which no longer counts, or loses microseconds of a GPU's time. */
#ifndef STANDIN_LEDGER_H
#define STANDIN_LEDGER_H

#include "node.h"

#include <pthread.h>
#include <stdint.h>

/* Kinds of memory on a GPU. */
enum kind {
    HELD_CONTEXT,
    HELD_MODULE,
    HELD_LINEAR,
    HELD_MANAGED,
    HELD_ARRAY,
    HELD_POOL,
    HELD_PHYSICAL, /* cuMemCreate */
    HELD_GRAPH,
    HELD_KINDS
};

enum { MOST_SLOTS = 512, MOST_EXPORTS = 1024, QUEUE_LENGTH = 1024, SAMPLES = 64 };

/* Work that a process gave to a GPU: in the order of its `end` times. */
struct work {
    uint64_t left; /* ns that it still has to run */
    uint64_t end;  /* end time, once left is 0 and finished is beyond it */
};

struct sample {
    uint64_t period; /* number of the sample period since time 0 */
    uint64_t busy;   /* ns in it */
};

/* One process on one GPU. */
struct use {
    uint64_t bytes[HELD_KINDS];
    uint64_t peak;
    uint64_t contexts;
    uint64_t launches;
    uint64_t busy;     /* ns run so far */
    uint64_t pushed;   /* work given so far; the newest is queue[(pushed - 1) % QUEUE_LENGTH] */
    uint64_t finished; /* number of finished works */
    struct work queue[QUEUE_LENGTH];
    struct sample samples[SAMPLES];
};

struct slot {
    uint32_t taken; /* 0: never used or given back; written last */
    uint32_t pid; /* in its own pid namespace */
    uint32_t initialised;
    uint32_t not_found; /* failed look-ups by cuGetProcAddress */
    uint32_t calls[MOST_EXPORTS]; /* of each export, in the order of the tables */
    struct use gpus[MOST_GPUS];
};

/* A GPU, which its processes use alternately. */
struct engine {
    uint64_t time; /* its work is done up to this time, ns */
    uint64_t turn_left;
    uint32_t turn; /* the slot whose turn it is */
    uint64_t peak; /* most bytes held at once */
};

struct ledger {
    uint64_t magic; /* written last */
    uint64_t slice_ns, sample_ns; /* as in node.h */
    uint64_t reaped; /* time of the last search for dead processes, ns */
    pthread_mutex_t mutex;
    uint32_t slots_used; /* no slot from here on was ever taken */
    struct engine engines[MOST_GPUS];
    struct slot slots[MOST_SLOTS];
};

extern struct ledger *ledger;   /* NULL: not open */
extern struct slot *ledger_own; /* of this process; NULL: none */

extern int ledger_file;         /* its descriptor, whose locks show the living processes */

/* Map the node's file, and make it if it is missing; returns 0, or -1 with errno. All processes
 * pass the same settings. */
int ledger_open(const char *path, uint64_t slice_ns, uint64_t sample_ns);
/* Take a slot for this process. After fork(2) a child gets its own slot. */
void ledger_join(void);
void ledger_lock(void);
void ledger_unlock(void);

/* These need the lock. */
void ledger_reap(void);
int ledger_alive(unsigned slot);
/* The process of a slot, by its pid in this process' pid namespace, as a driver reports it. */
uint32_t ledger_pid(unsigned slot);
uint64_t ledger_held(const struct use *use);
uint64_t ledger_resident(unsigned gpu);

/* Charge this process for `bytes` of a GPU; -1 if they do not fit. */
int ledger_charge(unsigned gpu, enum kind kind, uint64_t bytes);
void ledger_credit(unsigned gpu, enum kind kind, uint64_t bytes);
/* The figures of cuMemGetInfo. */
void ledger_free_and_total(unsigned gpu, uint64_t *free_bytes, uint64_t *total);

/* CLOCK_MONOTONIC in ns. */
uint64_t ledger_now(void);

#endif
