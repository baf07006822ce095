/*
 * The two files that the agent and the shims of a group share, and the messages of the agent's
 * socket. A group is the processes of one container, which has a share of one GPU.
 *
 *   limits  The agent writes this file. The container has a read-only mount.
 *   region  The shims write this file. The tenant can write anything here. So the agent takes no lock
 *           in it and reads it with pread(2). A mapping would cause SIGBUS after a truncation.
 *
 * The agent enters dead processes and the measured size of contexts in `limits`. The next shim that
 * counts applies them to `region`. The used bytes are the sum, over the used slots, of
 *
 *   data_bytes + (measured ? overhead_bytes of `limits` : context_bytes)
 *
 * All numbers are little-endian. The agent makes both files in full before the container starts. It
 * never replaces them, because a mount keeps showing its first file.
 */
#ifndef PODFABRIC_GPU_LAYOUT_H
#define PODFABRIC_GPU_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* The paths in the container. Tests compile the shim with another directory. */
#ifndef PF_DIRECTORY
#define PF_DIRECTORY "/run/podfabric/gpu"
#endif
#define PF_LIMITS_PATH PF_DIRECTORY "/limits"
#define PF_REGION_PATH PF_DIRECTORY "/region"
/* The directory is mounted, not the socket: an agent that starts again makes a new socket. */
#define PF_SOCKET_PATH PF_DIRECTORY "/agent/agent.sock"

enum {
    PF_VERSION = 1, /* of this file: of the layouts and of the protocol */
    PF_SLOTS = 256, /* the most processes of a group that use a GPU at the same time */
};

#define PF_LIMITS_MAGIC UINT64_C(0x7374696d694c6650) /* the bytes "PfLimits" */
#define PF_REGION_MAGIC UINT64_C(0x6e6f696765526650) /* the bytes "PfRegion" */
#define PF_NOT_MEASURED UINT64_MAX

/* ---- limits ------------------------------------------------------------------------------ */

struct pf_gpu_limit {
    uint8_t uuid[16];       /* the 16 bytes of cuDeviceGetUuid */
    uint64_t memory_bytes;  /* of the group */
    uint64_t context_bytes; /* charged for a context until the agent has measured it */
    uint64_t burst_ns;      /* GPU time that an idle group may use at once (tau) */
    uint64_t most_debt_ns;  /* the most by which `tat` is in the future */
    uint32_t share;         /* of the GPU's time, in 1/10000; 10000: launches are not delayed */
    uint32_t kappa;         /* factor of estimated costs: 16.16 fixed point */
    int64_t settled_ns;     /* GPU time to pay besides launches, in total; negative: a refund */
};

enum pf_process_state {
    PF_PROCESS_NONE = 0,
    PF_PROCESS_ALIVE = 1,
    PF_PROCESS_DEAD = 2, /* its slot is to be freed */
};

/* The agent's entry for the process in the slot of the same index. */
struct pf_process {
    uint64_t registration; /* as answered; an entry with another number than the slot's is ignored */
    uint64_t start_time;   /* /proc/HOST_PID/stat, field 22, clock ticks: pids are reused */
    uint32_t host_pid;     /* in the agent's pid namespace */
    uint32_t state;        /* enum pf_process_state */
    uint64_t overhead_bytes; /* the driver's figure minus data_bytes, at least 0; or PF_NOT_MEASURED */
};

/* Readers copy the file while `sequence` is even and unchanged. The agent writes an odd sequence, the
   changes, and the next even sequence, each with pwrite(2). The inode's lock orders these writes on
   every architecture. If the agent dies in between, readers keep their earlier copy. */
struct pf_limits {
    uint64_t magic;        /* PF_LIMITS_MAGIC */
    uint32_t version;      /* PF_VERSION */
    uint32_t size;         /* sizeof(struct pf_limits), bytes */
    uint64_t sequence;     /* even: stable. Every change below changes it; at least 2 */
    uint8_t allocation[16]; /* random; the same as in `region` */
    struct pf_gpu_limit gpu; /* its uuid never changes */
    struct pf_process process[PF_SLOTS]; /* by slot */
};

/* ---- region ------------------------------------------------------------------------------ */

/* The group's use of its GPU. The agent makes it all 0; after that only shims write. */
struct pf_gpu {
    /* Memory; under the mutex. */
    uint64_t used_bytes;       /* the sum of the slots, as of `applied` */
    uint64_t peak_bytes;       /* the largest used_bytes so far */
    uint64_t denied;           /* refused allocations */
    uint64_t reserved[6];

    /* Compute; atomics without a lock (gate.c). Times are CLOCK_MONOTONIC, ns. */
    uint64_t tat;           /* theoretical arrival time: the GPU time of the group is paid until then */
    uint64_t backlogged_at; /* the last time at which a launch waited; renewed every 100 ms at least */
    uint64_t longest_ns;    /* the largest estimate of a kernel or graph (d_f) in the last 30 s */
    uint64_t longest_at;    /* the time of longest_ns */
    int64_t settled_ns;     /* the part of settled_ns of `limits` that `tat` includes */
    /* GPU time of launches: as estimated, and as paid (times kappa; most_debt_ns may cut it). */
    uint64_t launched_ns;
    uint64_t paid_ns;

    /* Counters since the region was made; relaxed atomics. */
    uint64_t launches;    /* of kernels and graphs */
    uint64_t throttled;   /* launches that waited */
    uint64_t wait_ns;     /* the sum of all waits */
    uint64_t last_launch; /* CLOCK_MONOTONIC_COARSE, ns; 0: never */
    uint64_t finished_ns; /* the finished part of launched_ns */
    uint64_t paid_finished_ns;
    uint64_t reserved_counters[2];
};

enum pf_slot_state { PF_SLOT_FREE = 0, PF_SLOT_USED = 1 };

/* One process, or one copy of the shim in a process: dlmopen(3) can load several. */
struct pf_slot {
    uint32_t state;        /* enum pf_slot_state */
    uint32_t pid;          /* in its own pid namespace */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
    uint64_t start_time;   /* /proc/self/stat, field 22, clock ticks: pids are reused */
    uint64_t image;        /* differs after execve(2), equal in all copies of the shim; not 0 */
    uint64_t registration; /* the agent's answer; 0: not registered yet */
    uint64_t instance;     /* an address in this copy of the shim */
    uint64_t data_bytes;    /* allocated by calls, rounded like the driver's sizes */
    uint64_t context_bytes; /* 0, or pf_gpu_limit.context_bytes at the first context */
};

/* The mutex's kind, at byte 16 of a glibc pthread_mutex_t: PTHREAD_MUTEX_ROBUST_NORMAL_NP and the
   bit of PTHREAD_PROCESS_SHARED. All other bytes of an unlocked mutex are 0. */
enum { PF_MUTEX_KIND = 0x90, PF_MUTEX_KIND_AT = 16 };

struct pf_region {
    uint64_t magic;         /* PF_REGION_MAGIC; the agent writes it and the next three fields, once */
    uint32_t version;       /* PF_VERSION */
    uint32_t size;          /* sizeof(struct pf_region), bytes */
    uint8_t allocation[16]; /* the same as in `limits` */
    uint8_t reserved[32];

    /* A pthread_mutex_t, process-shared and robust; for the slots and the memory. */
    union {
        uint8_t bytes[64];
        uint64_t align;
    } mutex;

    /* Under the mutex. */
    uint64_t applied;         /* the `sequence` of `limits` in the last computation of used_bytes */
    uint64_t lock_recoveries; /* deaths of processes that had the mutex */
    uint64_t stale_slots;     /* freed slots of dead processes */
    uint64_t refused_slots;   /* processes that found no free slot */
    uint64_t reserved_counters[4];

    struct pf_gpu gpu;
    struct pf_slot slot[PF_SLOTS];
};

/* ---- the agent's socket ------------------------------------------------------------------ */

/* SOCK_SEQPACKET, one request and one answer, then both sides close. A process registers at its first
   cuInit: it takes a free slot in `region` and sends the slot's index. The agent gets the host's pid
   from SO_PEERCRED and finds the group by the cgroup. It opens a pidfd, writes limits.process[slot]
   (ALIVE, not measured), and answers. When the process ends, the agent writes DEAD with the same
   registration. */

/* The longest wait to connect and for the answer: an agent on a busy node may be slow. */
#ifndef PF_PATIENCE_MS
#define PF_PATIENCE_MS 30000
#endif

struct pf_request {
    uint32_t version; /* PF_VERSION */
    uint32_t slot;    /* index in pf_region.slot */
};

enum pf_status {
    PF_STATUS_OK = 0,
    PF_STATUS_VERSION = 1, /* the agent has another version of this protocol */
    PF_STATUS_STRANGER = 2, /* the process is in no container of this group */
    PF_STATUS_SLOT = 3,    /* no such slot, or another live process registered it */
    PF_STATUS_BUSY = 4,    /* the agent could not do it now */
};

struct pf_answer {
    uint32_t status;       /* enum pf_status; the rest is 0 unless it is PF_STATUS_OK */
    uint32_t host_pid;     /* of the process, in the agent's pid namespace */
    uint64_t registration; /* not 0, and never answered twice for the same slot of a group */
};

/* ---- what both sides rely on ------------------------------------------------------------- */

_Static_assert(sizeof(struct pf_gpu_limit) == 64, "layout");
_Static_assert(sizeof(struct pf_process) == 32, "layout");
_Static_assert(offsetof(struct pf_limits, gpu) == 40, "layout");
_Static_assert(offsetof(struct pf_limits, process) == 104, "layout");
_Static_assert(sizeof(struct pf_limits) == 8296, "layout");
_Static_assert(sizeof(struct pf_gpu) == 192, "layout");
_Static_assert(sizeof(struct pf_slot) == 64, "layout");
_Static_assert(offsetof(struct pf_region, mutex) == 64, "layout");
_Static_assert(offsetof(struct pf_region, applied) == 128, "layout");
_Static_assert(offsetof(struct pf_region, gpu) == 192, "layout");
_Static_assert(offsetof(struct pf_region, slot) == 384, "layout");
_Static_assert(sizeof(struct pf_region) == 16768, "layout");
_Static_assert(sizeof(struct pf_request) == 8 && sizeof(struct pf_answer) == 16, "layout");

#endif
