/* The group's account: the memory that its processes have allocated, and its limits (layout.h). A
   process joins at its first cuInit, or after a fork at the first call that needs a slot. */
#ifndef PODFABRIC_GPU_GROUP_H
#define PODFABRIC_GPU_GROUP_H

#include <stdbool.h>
#include <stdint.h>

#include "layout.h"

struct group_usage {
    uint64_t used_bytes;
    uint64_t limit_bytes;
};

/* Open the files and register, once. After an error writes one line to standard error. */
bool group_join(void);

/* Open the files without a slot, for a program that only reads. */
bool group_look(void);

bool group_has_gpu(const uint8_t uuid[16]);

/* Count bytes before they are allocated. False: they do not fit. */
bool group_charge(uint64_t bytes);

void group_denied(void);
void group_release(uint64_t bytes);

/* Replace counted bytes by the actual bytes, even if they do not fit. Returns whether they fit. */
bool group_replace(uint64_t counted, uint64_t actual);

/* For a process' first context, and after its last one. */
bool group_charge_context(void);
void group_release_context(void);

/* All zero after an error. */
struct group_usage group_usage(void);

#endif
