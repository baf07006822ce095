/* Which of the group's GPUs a call is about. */
#ifndef PODFABRIC_GPU_DEVICES_H
#define PODFABRIC_GPU_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "table.h"

/* The group's index of a device as the driver numbers it; GROUP_NO_GPU: the group has no such GPU. */
int gpu_of_device(int device);

/* The GPU of the calling thread's context. The result is the driver's, where there is none. */
int current_gpu(int *gpu);

/* Fill in gpu and owner: the calling thread's context. */
int current_owner(struct entry *entry);

/* The device that works on a stream, and its GPU. */
int device_of_stream(void *stream, int *device);

/* Whether what is called on the stream becomes a node of a graph. Then nothing else may be called. */
bool is_capturing(void *stream);

/* Around calls of the shim's own: in a thread that captures, many are illegal unless it says so. */
int begin_own_calls(void);
void end_own_calls(int mode);

/* Give up pools' and graphs' unused memory of a GPU. */
void trim_pools(int gpu);
void trim_graphs(int gpu);

/* Count what the driver reserves for graphs on a device, after a launch for which `expected` was. */
void settle_graphs(int device, int gpu, uint64_t expected);

/* What pools and graphs of a GPU take memory in: as far as seen, else what drivers do today. */
uint64_t granule_of(int gpu);
uint64_t round_up(uint64_t bytes, uint64_t granule);

/* What counts for memory that the driver keeps, of which it reserves so much now, after a call. Before
   it `counted` was, with `growing` of that for calls of other threads that are not done: what the
   memory grew by may be theirs in part, and what they have not taken of it yet they may still take. */
uint64_t counted_now(uint64_t counted, uint64_t growing, uint64_t reserved);

/* A captured allocation becomes a node of the graph that the stream captures. */
void note_captured(void *stream, int gpu, uint64_t bytes);

/* Read again what pools reserve on a GPU: memory freed in a stream's order goes later. */
void settle_pools(int gpu);

/* Count bytes, giving up unused memory where they do not fit. False: they do not fit, and that is
   counted. */
bool charge(int gpu, uint64_t bytes);

#endif
