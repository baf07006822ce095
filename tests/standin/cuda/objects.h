/* The objects of this process in the simulated driver: contexts, allocations, streams and so on. */
#ifndef STANDIN_OBJECTS_H
#define STANDIN_OBJECTS_H

#include "cuda_abi.h"
#include "ledger.h"

#include <pthread.h>

#define PUBLIC __attribute__((visibility("default")))

enum export {
#define EXPORT(base, version, symbol, per_thread) EXPORT_##symbol,
#include "exports.def"
#include "unsupported.def"
#undef EXPORT
    EXPORTS
};
_Static_assert((int)EXPORTS <= (int)MOST_EXPORTS, "room for the counts of calls");

enum type { CONTEXT = 1, ALLOCATION, ARRAY, POOL, PHYSICAL, RESERVATION, STREAM, EVENT, MODULE, FUNCTION,
            GRAPH, GRAPH_EXEC, GRAPH_NODE, REGISTRATION, GREEN_CONTEXT, EXTERNAL };

/* The beginning of every object. A handle is the object's address. An object with a device address
 * is also found by `start`. A destroyed object is marked and never freed, so that a later use of
 * it is found. */
struct object {
    enum type type;
    int destroyed;
    unsigned gpu;       /* index in the node, not in CUDA_VISIBLE_DEVICES */
    uint64_t start;     /* key in the tree of objects: device address or handle */
    uint64_t length;
    struct object *context; /* the object ends with this context; NULL: none */
    struct object *older, *newer; /* the living objects made before and after it */
};

/* Begin an export: count the call, fail it if the node's file says so, wait its latency, and refuse
 * it before cuInit. */
#define ENTER(symbol)                                                                              \
    do {                                                                                           \
        CUresult entered = enter(EXPORT_##symbol, 1);                                              \
        if (entered != SUCCESS)                                                                    \
            return entered;                                                                        \
    } while (0)
/* The same for calls that are allowed before cuInit. */
#define ENTER_EARLY(symbol)                                                                        \
    do {                                                                                           \
        CUresult entered = enter(EXPORT_##symbol, 0);                                              \
        if (entered != SUCCESS)                                                                    \
            return entered;                                                                        \
    } while (0)
#define TRY(call)                                                                                  \
    do {                                                                                           \
        CUresult tried = (call);                                                                   \
        if (tried != SUCCESS)                                                                      \
            return tried;                                                                          \
    } while (0)

/* Both ABIs of an export that takes a stream: NULL means another default stream in each. */
#define BOTH(symbol, parameters, call)                                                             \
    PUBLIC CUresult symbol parameters                                                              \
    {                                                                                              \
        const int per_thread = 0;                                                                  \
        ENTER(symbol);                                                                             \
        return call;                                                                               \
    }                                                                                              \
    PUBLIC CUresult symbol##_ptsz parameters                                                       \
    {                                                                                              \
        const int per_thread = 1;                                                                  \
        ENTER(symbol##_ptsz);                                                                      \
        return call;                                                                               \
    }

CUresult enter(enum export export, int needs_init);

/* One lock guards all objects, until the end of the block that contains LOCKED. */
void objects_lock(void);
void objects_unlock(int *held);
#define LOCKED                                                                                     \
    __attribute__((cleanup(objects_unlock))) int locked_here = 1;                                  \
    (void)locked_here;                                                                             \
    objects_lock()

/* These need the lock. */
/* A new object of `size` bytes (at least struct object). Its handle is its address if `start`
 * is 0. */
void *object_new(size_t size, enum type type, unsigned gpu, uint64_t start, uint64_t length,
                 struct object *context);
/* The object of that type with that handle; NULL: it never existed. A destroyed object aborts. */
void *object_of(CUhandle handle, enum type type);
/* The object of that type whose range has the address; NULL: none ever existed. A freed object
 * aborts. */
void *object_at(uint64_t address, enum type type);
/* Mark as destroyed. If the node reuses addresses, its address may be used again, and an
 * allocation's object is then gone. */
void object_destroy(struct object *object);
/* The newest object; the next is its `older`. */
struct object *objects_newest(void);
/* Print a line on stderr and end the process. */
void misuse(const char *what, uint64_t handle) __attribute__((noreturn));

/* A range of device addresses that this process does not use; 0: none is left. */
uint64_t address_take(uint64_t bytes, uint64_t alignment);
uint64_t address_take_32(uint32_t bytes);
void address_give_back(uint64_t start, uint64_t bytes);

/* devices.c */
/* Read CUDA_VISIBLE_DEVICES. */
void visible_read(void);
unsigned visible_count(void);
/* The node's index of a CUDA device; -1: no such device. */
int gpu_of(CUdevice device);
CUdevice device_of(unsigned gpu);
/* `gpu` and `card` of a CUDA device, or return. */
#define GPU_OF(device)                                                                             \
    if (gpu_of(device) < 0)                                                                        \
        return INVALID_DEVICE;                                                                     \
    unsigned gpu = (unsigned)gpu_of(device);                                                       \
    const struct node_gpu *card = &node_get()->gpus[gpu];                                          \
    (void)card
/* contexts.c: the thread's context in `found`, or INVALID_CONTEXT. Needs the lock. */
CUresult current_context(struct object **found);

/* capture.c: refuse calls that are forbidden while a stream is captured, and spoil the capture. */
CUresult capture_forbids(void);

#endif
