/* The simulated GPUs. Each runs the work of its processes in slices, one process after the
 * other, and each process' work in order. Time advances when a process looks. */
#ifndef STANDIN_QUEUE_H
#define STANDIN_QUEUE_H

#include "ledger.h"

/* A place in a process' work; its end can be queried. */
struct mark {
    uint64_t number; /* of the work, from 1; 0: none */
    uint64_t end;    /* end time, if the queue has dropped it */
};

/* Give a GPU work of `ns`, which ends after all earlier work of this process. Returns its
 * number, and keeps `mark` (may be NULL) updated. Waits while the process has QUEUE_LENGTH
 * outstanding works, as a driver's queue does. */
uint64_t queue_push(unsigned gpu, uint64_t ns, struct mark *mark);
/* The number of the newest work of this process on a GPU; 0: there was none. */
uint64_t queue_last(unsigned gpu);
int queue_ended(unsigned gpu, uint64_t number);
/* Whether the work at the mark has ended; if so, `end` gets the end time in ns of the node's
 * clock. */
int queue_mark_ended(unsigned gpu, const struct mark *mark, uint64_t *end);
void queue_wait(unsigned gpu, uint64_t number);
/* These need the ledger's lock. */
/* The remaining ns of a process' work up to that number. */
uint64_t queue_left(const struct use *use, uint64_t number);
/* Advance a GPU's time to now. */
void queue_advance(unsigned gpu);

#endif
