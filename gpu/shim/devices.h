/* Where a call allocates: on the group's GPU, or elsewhere. */
#ifndef PODFABRIC_GPU_DEVICES_H
#define PODFABRIC_GPU_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "table.h"

enum place {
    OURS,      /* the group's GPU */
    FOREIGN,   /* another one, on which the group gets nothing */
    UNCOUNTED, /* the host, or memory that another process pays for */
};

/* The place of a device as the driver numbers it. */
enum place place_of_device(int device);

enum place place_of_location(const struct cu_location *location);

/* The place of the calling thread's context. The result is the driver's, where there is none. */
int current_place(enum place *place);

/* The group's GPU as the driver numbers it; -1: it was not seen yet. */
int our_device(void);

/* Whether what is called on the stream becomes a node of a graph. Then nothing else may be called. */
bool is_capturing(void *stream);

/* Around calls of the shim's own: in a thread that captures, many are illegal unless it says so. */
int begin_own_calls(void);
void end_own_calls(int mode);

/* Give up pools' and graphs' unused memory. */
void trim_pools(void);
void trim_graphs(void);

/* Count what the driver reserves for graphs, after a launch for which `expected` was. */
void settle_graphs(uint64_t expected);

/* What pools and graphs take memory in: as far as seen, else what drivers do today. */
uint64_t granule(void);
uint64_t round_up(uint64_t bytes, uint64_t granule);

/* What counts for memory that the driver keeps, of which it reserves so much now, after a call. Before
   it `counted` was, with `growing` of that for calls of other threads that are not done: what the
   memory grew by may be theirs in part, and what they have not taken of it yet they may still take. */
uint64_t counted_now(uint64_t counted, uint64_t growing, uint64_t reserved);

/* A captured allocation becomes a node of the graph that the stream captures. */
void note_captured(void *stream, uint64_t bytes);

/* Read again what pools reserve: memory freed in a stream's order goes later. */
void settle_pools(void);

/* Count bytes at a place, giving up unused memory where they do not fit. False: they do not fit, and
   that is counted. */
bool charge(enum place place, uint64_t bytes);

/* Count the bytes of an entry where the calling thread's context is, before they are allocated. After
   the driver's answer: remember them by their key, or count them no more. */
int begin_allocation(struct entry *entry);
int finish_allocation(int result, struct entry *entry, uint64_t key);

#endif
