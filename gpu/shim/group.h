/*
 * The group's account: what its processes have allocated on their GPU, and what they may (layout.h).
 * A process opens the files and takes a slot at its first cuInit, or after a fork at the first call
 * that needs one.
 */
#ifndef PODFABRIC_GPU_GROUP_H
#define PODFABRIC_GPU_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

struct group_usage {
    uint64_t used_bytes;
    uint64_t limit_bytes;
};

/* Open the files and register, unless that is done. Says on standard error, once, why it fails. */
bool group_join(void);

/* Open the files without a slot, for a program that only looks. */
bool group_look(void);

/* Whether the group's GPU has these 16 bytes. */
bool group_has_gpu(const uint8_t uuid[16]);

/* Count bytes before they are allocated. False: they do not fit. */
bool group_charge(uint64_t bytes);

/* That group_charge failed and nothing else helped: count it. */
void group_denied(void);

/* Count less. */
void group_release(uint64_t bytes);

/* Replace what was counted by what turned out, whether it fits or not. True: it is within the limit. */
bool group_replace(uint64_t counted, uint64_t actual);

/* The first context, and the last one that goes. */
bool group_charge_context(void);
void group_release_context(void);

/* All zero if it cannot be told. */
struct group_usage group_usage(void);

#endif
