/*
 * The group's account: what its processes have allocated on each GPU, and what they may. GPUs are
 * named by their index in `limits` and `region` (layout.h), here `gpu`. A process opens the files and
 * takes a slot at its first cuInit, or after a fork at the first call that needs one.
 */
#ifndef PODFABRIC_GPU_GROUP_H
#define PODFABRIC_GPU_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

enum { GROUP_NO_GPU = -1 };

struct group_usage {
    uint64_t used_bytes;
    uint64_t limit_bytes; /* PF_NO_LIMIT */
};

/* Open the files and register, unless that is done. Says on standard error, once, why it fails. */
bool group_join(void);

/* Open the files without a slot, for a program that only looks. */
bool group_look(void);

/* How many GPUs the group has; 0 before the files are open. */
unsigned group_gpus(void);

/* The index of a GPU by its 16 bytes; GROUP_NO_GPU: it is not the group's. */
int group_gpu(const uint8_t uuid[16]);

/* Count bytes before they are allocated. False: they do not fit, or the GPU is not the group's. */
bool group_charge(int gpu, uint64_t bytes);

/* That group_charge failed and nothing else helped: count it. */
void group_denied(int gpu);

/* Count less. */
void group_release(int gpu, uint64_t bytes);

/* Replace what was counted by what turned out, whether it fits or not. True: it is within the limit. */
bool group_replace(int gpu, uint64_t counted, uint64_t actual);

/* The first context on a GPU, and the last one that goes. */
bool group_charge_context(int gpu);
void group_release_context(int gpu);

/* All zero if it cannot be told. */
struct group_usage group_usage(int gpu);

void group_count_import(int gpu);

/* Whether a process (pid in this or in the host's pid namespace) is of the group. */
bool group_has_process(uint32_t pid);

/* The counters of launches, for gate.c and launches.c; NULL before the process joined. */
struct pf_gpu *group_launches(int gpu);

#endif
