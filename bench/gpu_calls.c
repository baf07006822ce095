/*
 * Times calls of the driver's library by a program, with the library of gpu/shim between and without it, in
 * the same process, in turns. Times are of CLOCK_MONOTONIC, in nanoseconds, and hold the clock's own.
 *
 *   gpu_calls LIBRARY launch ROUNDS      lines "with NS" and "without NS", one for each call
 *   gpu_calls LIBRARY alloc ROUNDS LIVE  the same, for pairs of cuMemAlloc and cuMemFree
 *   gpu_calls LIBRARY address ROUNDS     the same, for cuGetProcAddress
 *   gpu_calls LIBRARY init               one line: the time of cuInit; it starts when its input ends
 *   gpu_calls LIBRARY memory LIVE        one line: resident bytes of the process with so many allocations
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 512 };

/* The functions of one of the two libraries. */
struct driver {
    const char *name;
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(uint64_t *, size_t);
    int (*release)(uint64_t);
    int (*load)(void **, const void *);
    int (*get_function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                  void **, void **);
    int (*synchronize)(void);
    int (*address)(const char *, void **, int, uint64_t, int *);
};

static void fail(const char *what)
{
    fprintf(stderr, "gpu_calls: %s failed\n", what);
    exit(1);
}

static void find(struct driver *driver, const char *name, void *library)
{
    driver->name = name;
    driver->init = (int (*)(unsigned))dlsym(library, "cuInit");
    driver->retain = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
    driver->set_current = (int (*)(void *))dlsym(library, "cuCtxSetCurrent");
    driver->alloc = (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2");
    driver->release = (int (*)(uint64_t))dlsym(library, "cuMemFree_v2");
    driver->load = (int (*)(void **, const void *))dlsym(library, "cuModuleLoadData");
    driver->get_function = (int (*)(void **, void *, const char *))dlsym(library, "cuModuleGetFunction");
    driver->launch = (int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              void *, void **, void **))dlsym(library, "cuLaunchKernel");
    driver->synchronize = (int (*)(void))dlsym(library, "cuCtxSynchronize");
    driver->address = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(
        library, "cuGetProcAddress_v2");
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void start(const struct driver *driver)
{
    void *context;

    if (driver->init(0) || driver->retain(&context, 0) || driver->set_current(context))
        fail("cuInit");
}

static void time_launch(const struct driver *driver, void *function)
{
    uint64_t began = now();
    int result = driver->launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);

    printf("%s %llu\n", driver->name, (unsigned long long)(now() - began));
    if (result)
        fail("cuLaunchKernel");
}

static void time_alloc(const struct driver *driver)
{
    uint64_t pointer, began = now();
    int result = driver->alloc(&pointer, BYTES) || driver->release(pointer);

    printf("%s %llu\n", driver->name, (unsigned long long)(now() - began));
    if (result)
        fail("cuMemAlloc");
}

static void time_address(const struct driver *driver, long round)
{
    static const struct {
        const char *name;
        int version;
    } asked[] = {{"cuMemAlloc", 3020}, {"cuCtxGetDevice", 2000}, {"cuLaunchKernel", 4000},
                 {"cuStreamCreate", 2000}, {"cuMemcpyHtoD", 3020}, {"cuEventRecord", 2000}};
    void *found;
    int status;
    long which = round % (long)(sizeof asked / sizeof asked[0]);
    uint64_t began = now();
    int result = driver->address(asked[which].name, &found, asked[which].version, 0, &status);

    printf("%s %llu\n", driver->name, (unsigned long long)(now() - began));
    if (result)
        fail("cuGetProcAddress");
}

static void allocate(const struct driver *driver, long live)
{
    uint64_t pointer;

    for (long i = 0; i < live; i++)
        if (driver->alloc(&pointer, BYTES))
            fail("cuMemAlloc");
}

static void print_resident(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    if (!file || fscanf(file, "%*u %lu", &pages) != 1)
        fail("/proc/self/statm");
    printf("%lu\n", pages * (unsigned long)sysconf(_SC_PAGESIZE));
}

static void *make_function(const struct driver *driver)
{
    void *module, *function;

    if (driver->load(&module, "kernel_0") || driver->get_function(&function, module, "kernel_0"))
        fail("cuModuleLoadData");
    return function;
}

int main(int count, char **arguments)
{
    struct driver both[2];
    const char *what = count > 2 ? arguments[2] : "";
    long rounds = count > 3 ? atol(arguments[3]) : 0;
    void *library = count > 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    char byte;

    if (!library)
        fail("dlopen");
    void *real = dlopen("libpfcuda-real.so.1", RTLD_NOW | RTLD_NOLOAD);

    find(&both[0], "with", library);
    find(&both[1], "without", real ? real : library);
    if (strcmp(what, "init") == 0) {
        while (read(STDIN_FILENO, &byte, 1) > 0)
            ;
        uint64_t began = now();

        if (both[0].init(0))
            fail("cuInit");
        printf("%llu\n", (unsigned long long)(now() - began));
        return 0;
    }
    start(&both[0]);
    if (strcmp(what, "memory") == 0) {
        allocate(&both[0], rounds);
        print_resident();
        return 0;
    }
    allocate(&both[0], count > 4 ? atol(arguments[4]) : 0);
    void *function = strcmp(what, "launch") == 0 ? make_function(&both[1]) : NULL;

    for (long round = 0; round < rounds; round++) {
        for (int which = 0; which < 2; which++) {
            if (strcmp(what, "launch") == 0)
                time_launch(&both[(round + which) % 2], function);
            else if (strcmp(what, "alloc") == 0)
                time_alloc(&both[(round + which) % 2]);
            else
                time_address(&both[(round + which) % 2], round);
        }
        if (function && round % 100 == 99 && both[1].synchronize())
            fail("cuCtxSynchronize");
    }
    return 0;
}
