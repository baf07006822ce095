/* Opens the two files of the group, and reads `limits` while the agent may write it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "process.h"
#include "say.h"

const struct pf_limits *limits_file;
struct pf_region *region;

enum { READS = 200 }; /* attempts; a change takes the agent microseconds */

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

static bool open_limits(void)
{
    if (limits_file)
        return true;
    const struct pf_limits *limits = map_file(PF_LIMITS_PATH, sizeof *limits, false);

    if (!limits || !right_version(PF_LIMITS_PATH, limits->magic, PF_LIMITS_MAGIC, limits->version))
        return false;
    limits_file = limits;
    return true;
}

bool files_open(void)
{
    if (region)
        return true;
    if (!open_limits())
        return false;
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
