/*
 * The two files that the agent and the shims of a group share, and the messages of the agent's
 * socket. A group is the processes of one container, which has a part of one GPU.
 *
 *   limits  The agent writes, the container reads (a read-only mount): what it may use of the GPU,
 *           and what the agent knows of each process.
 *   region  The shims write (a read-write mount): what each process has allocated. The tenant can
 *           write anything here, so the agent only reads it, with pread(2): a mapping would end in
 *           SIGBUS when the tenant truncates the file. It takes no lock of the tenant's either.
 *
 * So the agent tells of a dead process, and of a context's measured size, in `limits`; the next shim
 * that counts applies it to `region`. What is used is the sum, over the used slots, of
 *
 *   data_bytes + (the agent measured it ? overhead_bytes of `limits` : context_bytes)
 *
 * All numbers are little-endian. Both files have the size of their struct exactly; they lie on a
 * tmpfs and are made whole before the container starts, and are never replaced (a mount of a file
 * stays with the old one). A file with another magic, version or size makes cuInit fail.
 */
#ifndef PODFABRIC_GPU_LAYOUT_H
#define PODFABRIC_GPU_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* Where they are in the container. Tests compile the shim with another directory. */
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
    uint64_t burst_ns;      /* GPU time that may be used at once after a pause (tau) */
    uint64_t most_debt_ns;  /* `tat` is at most so far in the future */
    uint32_t share;         /* of the GPU's time, in 1/10000; 10000: launches are not delayed */
    uint32_t kappa;         /* what estimated costs are multiplied with: 16.16 fixed point */
    int64_t settled_ns;     /* GPU time that the group owes beside what its launches paid for, since the
                               files were made; negative: less. A change moves `tat` once */
};

enum pf_process_state {
    PF_PROCESS_NONE = 0,
    PF_PROCESS_ALIVE = 1,
    PF_PROCESS_DEAD = 2, /* or it executed a program that has nothing on a GPU: free its slot */
};

/* What the agent knows of the process in the slot of the same index. */
struct pf_process {
    uint64_t registration; /* as answered; where the slot's is another, this tells nothing of it */
    uint64_t start_time;   /* /proc/HOST_PID/stat, field 22, clock ticks: an agent that starts again
                              knows by it whether the pid is still that process */
    uint32_t host_pid;     /* in the agent's pid namespace */
    uint32_t state;        /* enum pf_process_state */
    uint64_t overhead_bytes; /* what the driver says of the process less data_bytes, at least 0;
                                PF_NOT_MEASURED */
};

/*
 * Readers copy the file while `sequence` is even and the same before and after. The agent writes
 * with pwrite(2): an odd sequence, what changes, the next even one. Each call holds the inode's
 * lock, which orders them on every architecture. Readers never wait for an agent that died in
 * between: they keep their copy, and a process that has none yet is refused. An agent that starts
 * writes all and makes `sequence` even.
 */
struct pf_limits {
    uint64_t magic;        /* PF_LIMITS_MAGIC */
    uint32_t version;      /* PF_VERSION */
    uint32_t size;         /* sizeof(struct pf_limits), bytes */
    uint64_t sequence;     /* even: stable. Changes with anything below, so at least 2 */
    uint8_t allocation[16]; /* any 16 bytes; the same as in `region` */
    struct pf_gpu_limit gpu; /* its uuid never changes */
    struct pf_process process[PF_SLOTS]; /* by slot */
};

/* ---- region ------------------------------------------------------------------------------ */

/* What the group has and does on its GPU. The agent makes all 0; after that only shims write. */
struct pf_gpu {
    /* Memory; under the mutex. */
    uint64_t used_bytes;       /* the sum of the slots, as of `applied` */
    uint64_t peak_bytes;       /* the most that used_bytes ever was */
    uint64_t denied;           /* allocations that were refused */
    uint64_t reserved[6];

    /* Compute; atomics without a lock (gate.c). Times are CLOCK_MONOTONIC, ns. */
    uint64_t tat;           /* theoretical arrival time: when the group's GPU time is paid off */
    uint64_t backlogged_at; /* when a launch last waited: one that still waits renews it each 100 ms
                               at least, so the agent's "backlogged" is: after my last look */
    uint64_t longest_ns;    /* the largest estimate of a kernel or graph (d_f) in the last 30 s */
    uint64_t longest_at;    /* when longest_ns was set */
    int64_t settled_ns;     /* of `limits`, as far as `tat` has it */
    /* GPU time of all launches that paid, and of those that are known to be finished: as estimated,
       and as paid for (times kappa; less where most_debt_ns was reached). */
    uint64_t launched_ns;
    uint64_t paid_ns;

    /* Counters since the region was made; relaxed atomics. */
    uint64_t launches;    /* of kernels and graphs */
    uint64_t throttled;   /* launches that waited */
    uint64_t wait_ns;     /* what all launches waited together */
    uint64_t last_launch; /* when: CLOCK_MONOTONIC, ns, by its coarse clock (1 to 4 ms); 0: never */
    uint64_t finished_ns; /* see launched_ns */
    uint64_t paid_finished_ns;
    uint64_t reserved_counters[2];
};

enum pf_slot_state { PF_SLOT_FREE = 0, PF_SLOT_USED = 1 };

/* One process; or one copy of the shim in a process, since dlmopen(3) can load it again. */
struct pf_slot {
    uint32_t state;        /* enum pf_slot_state */
    uint32_t pid;          /* in its own pid namespace */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid: only there the pid means something */
    uint64_t start_time;   /* /proc/self/stat, field 22, clock ticks: pids are used again */
    uint64_t image;        /* differs after execve(2), equal in all copies of the shim; not 0 */
    uint64_t registration; /* as the agent answered; 0: not yet */
    uint64_t instance;     /* which copy of the shim of this image: an address within it */
    uint64_t data_bytes;    /* all that was allocated by calls, as the driver rounds it */
    uint64_t context_bytes; /* 0, or pf_gpu_limit.context_bytes when a context was made */
};

/* The mutex's kind, at byte 16 of a glibc pthread_mutex_t: PTHREAD_MUTEX_ROBUST_NORMAL_NP and the
   bit of PTHREAD_PROCESS_SHARED. All other bytes of an open mutex are 0. */
enum { PF_MUTEX_KIND = 0x90, PF_MUTEX_KIND_AT = 16 };

struct pf_region {
    uint64_t magic;         /* PF_REGION_MAGIC; the agent writes it and what follows, once */
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
    uint64_t applied;         /* the `sequence` of `limits` that used_bytes was last computed for */
    uint64_t lock_recoveries; /* how often a process died within the lock */
    uint64_t stale_slots;     /* how many slots of dead processes were freed */
    uint64_t refused_slots;   /* how often a process found all slots used */
    uint64_t reserved_counters[4];

    struct pf_gpu gpu;
    struct pf_slot slot[PF_SLOTS];
};

/* ---- the agent's socket ------------------------------------------------------------------ */

/*
 * SOCK_SEQPACKET, one request and one answer, then both sides close. A process registers when it
 * first calls cuInit: it takes a free slot in `region` and names it. Who is asking the agent learns
 * from SO_PEERCRED: the host's pid, from its cgroup the container, from that the group. It opens a
 * pidfd, writes limits.process[slot] (host pid, ALIVE, nothing measured), and answers. When the
 * process ends it writes DEAD there, with the same registration.
 *
 * An agent that does not run is told at once: the kernel refuses the connection, or ends it. One that
 * runs may be slow, where the node has much else to do, and the shim waits for it, PF_PATIENCE_MS at
 * most to connect and as long for the answer.
 */
#ifndef PF_PATIENCE_MS
#define PF_PATIENCE_MS 30000
#endif

struct pf_request {
    uint32_t version; /* PF_VERSION */
    uint32_t slot;    /* index in pf_region.slot */
};

enum pf_status {
    PF_STATUS_OK = 0,
    PF_STATUS_VERSION = 1, /* the agent speaks another version of this protocol */
    PF_STATUS_STRANGER = 2, /* the process is in no container that holds a GPU */
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
