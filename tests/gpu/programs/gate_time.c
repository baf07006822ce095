/*
 * A process of a group whose launches go through the gate, by the real clock and without a driver:
 *     gate_time LIMITS REGION spared COUNT   launches that are never held back, as quick as it can
 *     gate_time LIMITS REGION held COUNT     launches that are
 * LIMITS and REGION are the files. It prints a line before its first launch, and after each `held`
 * one the time; the group's GPU is the first one.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "devices.h"
#include "driver.h"
#include "gate.h"

static int get_name(const char **name, void *function)
{
    *name = (uintptr_t)function == 1 ? "ncclDevKernel_Generic" : "matmul";
    return CU_SUCCESS;
}

struct driver driver = {.cuFuncGetName = get_name};

bool is_capturing(void *stream)
{
    (void)stream;
    return false;
}

int begin_own_calls(void)
{
    return 0;
}

void end_own_calls(int mode)
{
    (void)mode;
}

static void *map(const char *path, size_t size, int protection)
{
    int descriptor = open(path, protection & PROT_WRITE ? O_RDWR : O_RDONLY);
    void *mapped = mmap(NULL, size, protection, MAP_SHARED, descriptor, 0);

    if (descriptor < 0 || mapped == MAP_FAILED) {
        perror(path);
        exit(2);
    }
    return mapped;
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    const struct pf_limits *limits = map(arguments[1], sizeof *limits, PROT_READ);
    struct pf_region *region = map(arguments[2], sizeof *region, PROT_READ | PROT_WRITE);
    bool held = strcmp(arguments[3], "held") == 0;
    long launches = atol(arguments[4]);

    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("%llu\n", (unsigned long long)gate_now());
    for (long i = 0; i < launches; i++) {
        struct gate_launch launch = {.limit = &limits->gpu, .gpu = &region->gpu, .kind = GATE_KERNEL,
                                     .what = (void *)(uintptr_t)(held ? 2 : 1)};

        gate_before(&launch);
        gate_after(&launch, CU_SUCCESS);
        if (held)
            printf("%llu\n", (unsigned long long)gate_now());
    }
    return 0;
}
