/* Memory limits of cgroups, of drivers from R615 on. The cgroup tree is made up: a directory
 * that the node's file names. Where it has the file dmem.capacity in its root, the kernel's dmem
 * controller holds the limits, and must be enabled in a cgroup (dmem.max is there); else the
 * driver itself does. */
#include "nvml.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST_DRIVER = 615 };

struct set_limits {
    const char *cgroup;
    unsigned long long soft, hard;
};

struct get_limits {
    const char *cgroup;
    unsigned long long soft, hard, used;
};

static int has_file(const char *directory, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return access(path, F_OK) == 0;
}

/* Whether limits can be set, and the cgroup is one of the tree. */
static nvmlReturn check(const char *cgroup)
{
    const char *root = node_get()->cgroups;
    struct stat found;
    if (root == NULL || atoi(node_get()->driver) < FIRST_DRIVER)
        return NVML_NOT_SUPPORTED;
    if (cgroup == NULL || strlen(cgroup) >= sizeof ledger->limits->cgroup)
        return NVML_INVALID_ARGUMENT;
    if (strncmp(cgroup, root, strlen(root)) != 0 || stat(cgroup, &found) != 0 ||
        !S_ISDIR(found.st_mode))
        return NVML_NOT_FOUND;
    return has_file(root, "dmem.capacity") && !has_file(cgroup, "dmem.max") ? NVML_NOT_FOUND
                                                                            : NVML_SUCCESS;
}

/* Write what the kernel would show. */
static void show(unsigned gpu, const struct set_limits *limits)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/dmem.max", limits->cgroup);
    if (access(path, F_OK) != 0)
        return;
    FILE *file = fopen(path, "we");
    if (file == NULL)
        return;
    if (limits->hard == UINT64_MAX)
        fprintf(file, "nvidia/%s/vidmem max\n", node_get()->gpus[gpu].pci);
    else
        fprintf(file, "nvidia/%s/vidmem %llu\n", node_get()->gpus[gpu].pci, limits->hard);
    fclose(file);
}

static nvmlReturn record(unsigned gpu, const struct set_limits *limits)
{
    struct limit *place = ledger_limit(limits->cgroup, gpu);
    for (struct limit *one = ledger->limits; place == NULL; one++) {
        if (one == ledger->limits + MOST_LIMITS)
            return NVML_INSUFFICIENT_RESOURCES;
        if (one->cgroup[0] == 0 || access(one->cgroup, F_OK) != 0)
            place = one; /* a limit ends with its cgroup */
    }
    place->cgroup[0] = 0;
    place->gpu = gpu;
    place->soft = limits->soft;
    place->hard = limits->hard;
    strcpy(place->cgroup, limits->cgroup);
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlDeviceSetMemoryLimits_v1(nvmlDevice device, const struct set_limits *limits)
{
    NVML_GPU(device);
    if (limits == NULL || limits->soft > limits->hard)
        return NVML_INVALID_ARGUMENT;
    nvmlReturn result = check(limits->cgroup);
    if (result != NVML_SUCCESS)
        return result;
    if (geteuid() != 0)
        return NVML_NO_PERMISSION;
    ledger_lock();
    result = record(gpu, limits);
    ledger_unlock();
    if (result == NVML_SUCCESS)
        show(gpu, limits);
    return result;
}

/* Before the first limit of a cgroup is set there is nothing to get. */
PUBLIC nvmlReturn nvmlDeviceGetMemoryLimits_v1(nvmlDevice device, struct get_limits *limits)
{
    NVML_GPU(device);
    if (limits == NULL)
        return NVML_INVALID_ARGUMENT;
    nvmlReturn result = check(limits->cgroup);
    if (result != NVML_SUCCESS)
        return result;
    ledger_lock();
    ledger_reap();
    const struct limit *limit = ledger_limit(limits->cgroup, gpu);
    if (limit != NULL) {
        limits->soft = limit->soft;
        limits->hard = limit->hard;
        limits->used = ledger_resident_in(limits->cgroup, gpu);
    }
    ledger_unlock();
    return limit != NULL ? NVML_SUCCESS : NVML_NOT_FOUND;
}
