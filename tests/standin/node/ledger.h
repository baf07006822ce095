/* What the simulated node's GPUs hold and do, in a file that all processes of the node map.
 *
 * Each process has a slot, and holds a lock on the slot's byte of the file (an open file
 * description lock, fcntl(2)) as long as it lives: the kernel drops it however the process ends,
 * so a slot whose byte can be locked counts nothing, as a driver frees what a dead process had.
 * Its record lock (F_SETLK) in a second file says which process that is, in anyone's pid namespace.
 * All else is guarded by one robust mutex. A process killed inside it leaves its own slot wrong,
 * which no longer counts, or loses microseconds of a GPU's time. */
#ifndef STANDIN_LEDGER_H
#define STANDIN_LEDGER_H

#include "node.h"

#include <pthread.h>
#include <stdint.h>

/* What occupies a GPU's memory. */
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
    uint64_t end;  /* when it ended, once left is 0 and finished is beyond it */
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
    uint64_t finished; /* of these, done */
    struct work queue[QUEUE_LENGTH];
    struct sample samples[SAMPLES];
};

struct slot {
    uint32_t taken; /* 0: never used or given back; written last */
    uint32_t pid; /* in its own pid namespace */
    uint32_t initialised;
    uint32_t not_found; /* look-ups by cuGetProcAddress that found nothing */
    uint32_t calls[MOST_EXPORTS]; /* of each export, in the order of the tables */
    struct use gpus[MOST_GPUS];
};

/* A GPU, shared between the processes in turns. */
struct engine {
    uint64_t time; /* up to which its work is done, ns */
    uint64_t turn_left;
    uint32_t turn; /* the slot whose turn it is */
    uint64_t peak; /* most bytes held at once */
};

struct ledger {
    uint64_t magic; /* written last */
    uint64_t slice_ns, sample_ns; /* as in node.h */
    uint64_t reaped; /* when dead processes were last looked for, ns */
    pthread_mutex_t mutex;
    uint32_t slots_used; /* no slot from here on was ever taken */
    struct engine engines[MOST_GPUS];
    struct slot slots[MOST_SLOTS];
};

extern struct ledger *ledger;   /* NULL: not open */
extern struct slot *ledger_own; /* of this process; NULL: none */

extern int ledger_file;         /* its descriptor, whose locks say who lives */

/* Map the node's file, making it where it is missing; 0, or -1 with errno. All processes give the
 * same settings. */
int ledger_open(const char *path, uint64_t slice_ns, uint64_t sample_ns);
/* Take a slot for this process, and keep it over fork(2): a child gets one of its own. */
void ledger_join(void);
void ledger_lock(void);
void ledger_unlock(void);

/* These need the lock. */
void ledger_reap(void);
int ledger_alive(unsigned slot);
/* The process of a slot, by its pid in the pid namespace of this process, as a driver tells it. */
uint32_t ledger_pid(unsigned slot);
uint64_t ledger_held(const struct use *use);
uint64_t ledger_resident(unsigned gpu);

/* Charge this process `bytes` of a GPU; -1 where they do not fit. */
int ledger_charge(unsigned gpu, enum kind kind, uint64_t bytes);
void ledger_credit(unsigned gpu, enum kind kind, uint64_t bytes);
/* What cuMemGetInfo says. */
void ledger_free_and_total(unsigned gpu, uint64_t *free_bytes, uint64_t *total);

/* CLOCK_MONOTONIC in ns. */
uint64_t ledger_now(void);

#endif
