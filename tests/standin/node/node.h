/* The GPUs of the simulated node, and its driver's behaviour. They are in the JSON file that
 * PODFABRIC_STANDIN_GPUS names (tests/standin/gpus.py writes it and describes each key). Without
 * the variable, they are in NODE_OF_MACHINE, because a machine has one driver. */
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
    uint64_t bytes;           /* NVML's total */
    uint64_t reserved_bytes;  /* the driver's part of it, which CUDA's total lacks */
    uint64_t context_bytes;   /* size of a context */
    uint64_t module_bytes;    /* size of a loaded module */
    unsigned minor;
};

struct node {
    const char *state;        /* path of the shared file, see ledger.h */
    const char *driver;       /* as "615.20.01" */
    unsigned cuda;            /* newest CUDA version of the driver, as 13050 */
    int reuse_addresses;      /* the next allocation of its size gets a freed address */
    int reenter;              /* exports call each other, as in a library without -Bsymbolic */
    uint64_t slice_ns;        /* a process' turn on a busy GPU */
    uint64_t sample_ns;       /* period of utilisation samples */
    uint64_t pool_chunk;      /* a pool reserves multiples of these bytes */
    const struct json *latency_ns;     /* per export, or "*" */
    const struct json *failures;       /* [{"call", "nth", "result"}] of one process */
    uint64_t pitch;           /* rows of cuMemAllocPitch are multiples of these bytes */
    const char *listed;       /* NVML's list with the processes: compute, graphics, mps */
    const char *nodes;        /* directory of the GPUs' device nodes; NULL: there are none */
    unsigned gpu_count;
    struct node_gpu gpus[MOST_GPUS];
    unsigned opened_count;        /* number of GPUs whose node this process can open */
    unsigned opened[MOST_GPUS];   /* their indices in `gpus` */
};

/* The node, read on the first call; NULL if its file is missing: no driver is loaded. */
const struct node *node_get(void);
/* The UUID's 16 bytes. */
void node_uuid_bytes(const struct node_gpu *gpu, unsigned char bytes[16]);

#endif
