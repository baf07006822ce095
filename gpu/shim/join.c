/* Joins the group: opens its files, takes a slot, and registers with the agent (layout.h). */
#define _GNU_SOURCE
#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "process.h"
#include "say.h"

enum { READS = 200 }; /* of `limits`; a change takes the agent microseconds */

const struct pf_limits *limits_file;
struct pf_region *region;

static const struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = PF_SOCKET_PATH};

static void *map_file(const char *path, size_t size, bool writable)
{
    void *mapped = MAP_FAILED;
    int descriptor = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);

    if (descriptor < 0) {
        COMPLAIN("%s: %s: no GPU can be used; is podfabric's agent running?", path, strerror(errno));
        return NULL;
    }
    /* lseek, because fstat(2) has another name in old C libraries. */
    off_t actual = lseek(descriptor, 0, SEEK_END);

    if (actual != (off_t)size)
        COMPLAIN("%s has %lld bytes instead of %zu: no GPU can be used; the agent and this library are of "
            "different versions: start the container again", path, (long long)actual, size);
    else
        mapped = mmap(NULL, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, descriptor, 0);
    close(descriptor);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static bool right_version(const char *path, uint64_t magic, uint64_t expected, uint32_t version)
{
    if (magic == expected && version == PF_VERSION)
        return true;
    COMPLAIN("%s is not of version %d: no GPU can be used; the agent and this library are of different "
        "versions: start the container again", path, PF_VERSION);
    return false;
}

static bool files_open(void)
{
    if (region)
        return true;
    if (!limits_file) {
        const struct pf_limits *limits = map_file(PF_LIMITS_PATH, sizeof *limits, false);

        if (!limits || !right_version(PF_LIMITS_PATH, limits->magic, PF_LIMITS_MAGIC, limits->version))
            return false;
        limits_file = limits;
    }
    struct pf_region *found = map_file(PF_REGION_PATH, sizeof *found, true);

    if (!found || !right_version(PF_REGION_PATH, found->magic, PF_REGION_MAGIC, found->version))
        return false;
    if (memcmp(found->allocation, limits_file->allocation, sizeof found->allocation) != 0 ||
        found->mutex.bytes[PF_MUTEX_KIND_AT] != PF_MUTEX_KIND) {
        COMPLAIN(PF_REGION_PATH " does not belong to " PF_LIMITS_PATH ": no GPU can be used; start "
                 "the container again");
        return false;
    }
    region = found;
    return true;
}

bool files_read_limits(struct limits *copy)
{
    for (int i = 0; i < READS; i++) {
        struct limits read = {.sequence = limits_stable()};

        if (read.sequence != 0) {
            read.gpu = limits_file->gpu;
            if (limits_are_still(read.sequence)) {
                *copy = read;
                return true;
            }
        }
        sched_yield();
    }
    return false; /* the agent is writing, or died while it wrote */
}

static long long milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Limit the time of connect, send and recv. False: no time is left. */
static bool set_patience(int peer, long long left)
{
    struct timeval patience = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};

    if (left <= 0)
        return false;
    return setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0 &&
           setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0;
}

/* Wait again after a signal, for the rest of the time. */
static bool wait_on(int peer, long long deadline)
{
    return errno == EINTR && set_patience(peer, deadline - milliseconds());
}

static int ask(int peer, uint32_t slot, struct pf_answer *answer)
{
    struct pf_request request = {.version = PF_VERSION, .slot = slot};
    long long deadline = milliseconds() + PF_PATIENCE_MS;
    ssize_t length;

    if (!set_patience(peer, PF_PATIENCE_MS))
        return errno;
    while (connect(peer, (const struct sockaddr *)&address, sizeof address) != 0)
        if (!wait_on(peer, deadline))
            return errno == EAGAIN || errno == EINTR ? ETIMEDOUT : errno;
    if (send(peer, &request, sizeof request, MSG_NOSIGNAL) != sizeof request)
        return errno ? errno : EIO;
    while ((length = recv(peer, answer, sizeof *answer, 0)) < 0)
        if (!wait_on(peer, deadline))
            return errno == EAGAIN || errno == EINTR ? ETIMEDOUT : errno;
    if (length != sizeof *answer)
        return EPROTO;
    return answer->status == PF_STATUS_OK ? 0 : -(int)(answer->status & 0xff);
}

static int agent_register(uint32_t slot, struct pf_answer *answer)
{
    int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    if (peer < 0)
        return errno;
    errno = 0;
    int error = ask(peer, slot, answer);

    close(peer);
    return error;
}

static bool agent_runs(void)
{
    int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (peer < 0)
        return false;
    bool runs = connect(peer, (const struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN;

    close(peer);
    return runs;
}

static bool open_group(void)
{
    if (!files_open())
        return false;
    for (int waited = 0; process->limits.sequence == 0 && !files_read_limits(&process->limits); waited++) {
        /* A change takes microseconds, but the agent may not get a CPU. */
        if (waited == PF_PATIENCE_MS || !agent_runs()) {
            COMPLAIN("the agent ended while it wrote " PF_LIMITS_PATH ": no GPU can be used until it "
                     "runs again");
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return true;
}

static const char *reason(int error)
{
    switch (-error) {
    case PF_STATUS_VERSION:
        return "it has another version; start the container again";
    case PF_STATUS_STRANGER:
        return "it does not find this process in the container";
    case PF_STATUS_SLOT:
        return "it has another process in the same slot";
    case PF_STATUS_BUSY:
        return "it could not register the process now; try again";
    default:
        return error > 0 ? strerror(error) : "its answer is unknown to this library";
    }
}

/* Enter the agent's answer into the slot, or free the slot. */
static bool finish_slot(int error, const struct pf_answer *answer)
{
    if (!region_lock())
        return false;
    struct pf_slot *slot = &region->slot[process->slot];

    if (slot_is_ours()) {
        if (error != 0)
            slot->state = PF_SLOT_FREE;
        else
            process->registration = slot->registration = answer->registration;
    }
    if (slot_counts()) /* the process was taken for dead, but has memory */
        slots_recompute();
    region_unlock();
    return error == 0;
}

static bool join(void)
{
    struct pf_answer answer = {0};

    if (!open_group())
        return false;
    process_identify();
    if (!region_lock())
        return false;
    bool taken = slot_take();

    region_unlock();
    if (!taken)
        return false;
    int error = agent_register(process->slot, &answer);

    if (error != 0)
        COMPLAIN("the agent does not register this process at " PF_SOCKET_PATH ": %s. No GPU can be "
                 "used", reason(error));
    return finish_slot(error, &answer);
}

bool group_join(void)
{
    if (!process)
        return false;
    if (atomic_load_explicit(&process->joined, memory_order_acquire) == JOINED)
        return true;
    pthread_mutex_lock(&process->join_lock);
    if (process->joined != JOINED)
        process->joined = join() ? JOINED : JOIN_FAILED;
    bool joined = process->joined == JOINED;

    pthread_mutex_unlock(&process->join_lock);
    return joined;
}

bool group_look(void)
{
    if (!process)
        return false;
    pthread_mutex_lock(&process->join_lock);
    bool open = open_group();

    pthread_mutex_unlock(&process->join_lock);
    return open;
}
