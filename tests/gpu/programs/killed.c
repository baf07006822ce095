/*
 * Starts processes that allocate and free memory of one kind, and die at a step of the shim. Each line
 * of its input is one of them, with tabs between
 *
 *   KIND    linear, pool, physical or array
 *   NTH     it kills itself when it is there so often; 0: never
 *   STEP    the step's name; *: any
 *   NODE    the file of the stand-in's node
 *
 * and each line of its output tells of one that has ended: pid, status of waitpid(2), CLOCK_MONOTONIC at
 * its last step in ns (0: it died elsewhere, or not at all), and that step's name.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COUNT = 8, MIB = 1 << 20, NOT_FOUND = 500 };

static struct last_step {
    uint64_t time;
    char name[64];
} *last_step; /* shared with the child */

static const char *wanted;
static int left;

/* The shim's tests are built to call this (gpu/shim/process.h, STEP). */
void pf_step(const char *name)
{
    struct timespec now;

    if ((strcmp(wanted, "*") != 0 && strcmp(wanted, name) != 0) || --left != 0)
        return;
    strncpy(last_step->name, name, sizeof last_step->name - 1);
    clock_gettime(CLOCK_MONOTONIC, &now);
    last_step->time = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    kill(getpid(), SIGKILL);
}

static void *library;
static int failed; /* the first error of the driver */

static void call(const char *symbol, uint64_t first, uint64_t second, uint64_t third, uint64_t fourth,
                 uint64_t fifth)
{
    int (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) =
        (int (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))dlsym(library, symbol);

    if (!failed)
        failed = function ? function(first, second, third, fourth, fifth) : NOT_FOUND;
}

#define ADDRESS(PLACE) ((uint64_t)(uintptr_t)&(PLACE))

static void linear(void)
{
    uint64_t pointer[COUNT];

    for (int i = 0; i < COUNT; i++)
        call("cuMemAlloc_v2", ADDRESS(pointer[i]), MIB, 0, 0, 0);
    for (int i = 0; i < COUNT; i++)
        call("cuMemFree_v2", pointer[i], 0, 0, 0, 0);
}

static void pool(void)
{
    struct {
        int allocation_type, handle_type, location_type, location;
        uint64_t more[10];
    } properties = {1, 0, 1, 0, {0}}; /* CUmemPoolProps of device 0 */
    uint64_t own, pointer[COUNT];

    call("cuMemPoolCreate", ADDRESS(own), ADDRESS(properties), 0, 0, 0);
    for (int i = 0; i < COUNT / 2; i++)
        call("cuMemAllocFromPoolAsync", ADDRESS(pointer[i]), MIB, own, 0, 0);
    for (int i = COUNT / 2; i < COUNT; i++)
        call("cuMemAllocAsync", ADDRESS(pointer[i]), MIB, 0, 0, 0);
    for (int i = 0; i < COUNT; i++)
        call("cuMemFreeAsync", pointer[i], 0, 0, 0, 0);
    call("cuCtxSynchronize", 0, 0, 0, 0, 0);
    call("cuMemPoolTrimTo", own, 0, 0, 0, 0);
    call("cuMemPoolDestroy", own, 0, 0, 0, 0);
}

static void physical(void)
{
    struct {
        int type, handle_type, location_type, location;
        uint64_t more[2];
    } properties = {1, 1, 1, 0, {0}}; /* CUmemAllocationProp of device 0 */
    uint64_t base, handle[COUNT], size = 2 * MIB;

    call("cuMemAddressReserve", ADDRESS(base), COUNT * size, 0, 0, 0);
    for (int i = 0; i < COUNT; i++) {
        call("cuMemCreate", ADDRESS(handle[i]), size, ADDRESS(properties), 0, 0);
        call("cuMemMap", base + (uint64_t)i * size, size, 0, handle[i], 0);
        call("cuMemRelease", handle[i], 0, 0, 0, 0); /* it is mapped, and counts on */
    }
    for (int i = 0; i < COUNT; i++)
        call("cuMemUnmap", base + (uint64_t)i * size, size, 0, 0, 0);
}

static void array(void)
{
    struct {
        size_t width, height;
        int format;
        unsigned channels;
    } description = {512, 512, 0x20, 1}; /* CUDA_ARRAY_DESCRIPTOR of 1 MiB */
    uint64_t made[COUNT];

    for (int i = 0; i < COUNT; i++)
        call("cuArrayCreate_v2", ADDRESS(made[i]), ADDRESS(description), 0, 0, 0);
    for (int i = 0; i < COUNT; i++)
        call("cuArrayDestroy", made[i], 0, 0, 0, 0);
}

static int run(const char *kind)
{
    uint64_t context;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return 200;
    call("cuInit", 0, 0, 0, 0, 0);
    call("cuDevicePrimaryCtxRetain", ADDRESS(context), 0, 0, 0, 0);
    call("cuCtxSetCurrent", context, 0, 0, 0, 0);
    if (strcmp(kind, "linear") == 0)
        linear();
    else if (strcmp(kind, "pool") == 0)
        pool();
    else if (strcmp(kind, "physical") == 0)
        physical();
    else if (strcmp(kind, "array") == 0)
        array();
    else
        return 201;
    call("cuDevicePrimaryCtxRelease_v2", 0, 0, 0, 0, 0);
    return failed ? failed % 200 + 1 : 0;
}

int main(void)
{
    char line[4096];

    last_step = mmap(NULL, sizeof *last_step, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    while (last_step != MAP_FAILED && fgets(line, sizeof line, stdin)) {
        const char *kind = strtok(line, "\t\n"), *nth = strtok(NULL, "\t\n"), *node;
        int status;

        wanted = strtok(NULL, "\t\n");
        node = strtok(NULL, "\t\n");
        if (!node)
            return 2;
        *last_step = (struct last_step){0};
        left = atoi(nth);
        pid_t child = fork();

        if (child == 0) {
            setenv("PODFABRIC_STANDIN_GPUS", node, 1);
            _exit(run(kind));
        }
        if (child < 0 || waitpid(child, &status, 0) != child)
            return 3;
        printf("%d\t%d\t%llu\t%s\n", child, status, (unsigned long long)last_step->time, last_step->name);
        fflush(stdout);
    }
    return 0;
}
