/* The GPUs of the simulated node, and how its driver behaves: the JSON file that
 * PODFABRIC_STANDIN_GPUS names (tests/standin/gpus.py writes it and says what each key means), or
 * else NODE_OF_MACHINE, as a machine has one driver and no variable for it. */
#ifndef STANDIN_NODE_H
#define STANDIN_NODE_H

#include "json.h"

#include <stdint.h>

#define NODE_OF_MACHINE "/run/standin-gpus/gpus.json"

enum { MOST_GPUS = 8 };

struct node_gpu {
    const char *name;
    const char *uuid;         /* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
    const char *pci;          /* dddddddd:bb:dd.f */
    uint64_t bytes;           /* what NVML calls total */
    uint64_t reserved_bytes;  /* of these, what the driver keeps: CUDA's total lacks them */
    uint64_t context_bytes;   /* what a context occupies */
    uint64_t module_bytes;    /* what a loaded module occupies */
    unsigned minor;
};

struct node {
    const char *state;        /* path of the shared file, see ledger.h */
    const char *driver;       /* as "615.20.01" */
    unsigned cuda;            /* newest CUDA version of the driver, as 13050 */
    int reuse_addresses;      /* the address of freed memory is given to the next of its size */
    int reenter;              /* exports call each other, as a library without -Bsymbolic does */
    uint64_t slice_ns;        /* a process' turn on a busy GPU */
    uint64_t sample_ns;       /* period of utilisation samples */
    uint64_t pool_chunk;      /* a pool reserves multiples of these bytes */
    const struct json *latency_ns;     /* per export, or "*" */
    const struct json *failures;       /* [{"call", "nth", "result"}] of one process */
    uint64_t pitch;           /* rows of cuMemAllocPitch are multiples of these bytes */
    const char *listed;       /* the list of NVML that has the processes: compute, graphics, mps */
    const char *nodes;        /* directory of the GPUs' device nodes; NULL: there are none */
    unsigned gpu_count;
    struct node_gpu gpus[MOST_GPUS];
    unsigned opened_count;        /* GPUs that this process has: whose node it can open */
    unsigned opened[MOST_GPUS];   /* their indices in `gpus` */
};

/* The node, read on the first call; NULL where there is no such file: no driver is loaded. */
const struct node *node_get(void);
/* The UUID's 16 bytes. */
void node_uuid_bytes(const struct node_gpu *gpu, unsigned char bytes[16]);

#endif
