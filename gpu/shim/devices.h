/* Finds the GPU on which a call allocates memory. Marks the driver calls that the shim itself makes. */
#ifndef PODFABRIC_GPU_DEVICES_H
#define PODFABRIC_GPU_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "driver.h"
#include "table.h"

enum place {
    OURS,      /* the group's GPU */
    FOREIGN,   /* another GPU, where the group gets no memory */
    UNCOUNTED, /* the host, or memory that counts for another process */
};

/* Devices have the driver's numbers. */
enum place place_of_device(int device);
enum place place_of_location(const struct cu_location *location);

/* The place of the calling thread's context. Returns the driver's result. */
int current_place(enum place *place);

/* The group's GPU; -1: no call has used it yet. */
int our_device(void);

/* Whether calls on the stream become nodes of a graph. Then the shim must not call the driver. */
bool is_capturing(void *stream);

/* Around the shim's own calls: many are illegal in a capturing thread without this mode. */
int begin_own_calls(void);
void end_own_calls(int mode);

void trim_pools(void);
void trim_graphs(void);

/* Count the memory that the driver reserves for graphs, after a launch that `expected` was charged for. */
void settle_graphs(uint64_t expected);

/* The unit in which pools and graphs grow: the smallest one seen, or the usual one. */
uint64_t granule(void);
uint64_t round_up(uint64_t bytes, uint64_t granule);

/* The bytes to count for memory of which the driver now reserves `reserved`. `counted` counted so far,
   `growing` of it for unfinished calls of other threads, which may have got part of it already. */
uint64_t counted_now(uint64_t counted, uint64_t growing, uint64_t reserved);

/* Record a captured allocation, a node of the graph that the stream captures. */
void note_captured(void *stream, uint64_t bytes);

/* Count again what pools reserve: freed memory leaves a pool later, in the stream's order. */
void settle_pools(void);

/* Count bytes. If they do not fit, release unused memory. False: they still do not fit. */
bool charge(enum place place, uint64_t bytes);

/* Before an allocation: count the entry's bytes. After it: record the entry, or release its bytes. */
int begin_allocation(struct entry *entry);
int finish_allocation(int result, struct entry *entry, uint64_t key);

#endif
