/*
 * Times launches of a kernel that takes no time, one by one, with the libcuda.so.1 that the loader
 * finds:
 *
 *   gpu_gate LAUNCHES
 *
 * Prints the median and the 99th percentile of a launch, of all but those that the gate times with
 * events (one in 256), and the same two of these; ns. The first launches count in neither.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { EVERY = 256, WARM = 2 * EVERY };

typedef int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void *, void **, void **);

static void *library;

static void *find(const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return found;
}

static void check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "%s answered %d\n", what, result);
        exit(3);
    }
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

int main(int count, char **arguments)
{
    void *context, *module, *function;
    long launches = count == 2 ? atol(arguments[1]) : 0, usual = 0, timed = 0;
    uint64_t *of_usual = calloc((size_t)launches + 1, sizeof *of_usual);
    uint64_t *of_timed = calloc((size_t)launches + 1, sizeof *of_timed);

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (launches <= 2 * WARM || !library || !of_usual || !of_timed)
        return 2;
    check(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
    check(((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0),
          "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    check(((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, "image"),
          "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))find("cuModuleGetFunction"))(&function, module,
                                                                               "empty"),
          "cuModuleGetFunction");
    launch_kernel launch = (launch_kernel)find("cuLaunchKernel");

    for (long i = 0; i < launches; i++) {
        uint64_t before = now();

        check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        uint64_t took = now() - before;

        if (i >= WARM && i % EVERY == 0)
            of_timed[timed++] = took;
        else if (i >= WARM)
            of_usual[usual++] = took;
    }
    qsort(of_usual, (size_t)usual, sizeof *of_usual, by_size);
    qsort(of_timed, (size_t)timed, sizeof *of_timed, by_size);
    printf("%llu %llu %llu %llu\n", (unsigned long long)of_usual[usual / 2],
           (unsigned long long)of_usual[usual * 99 / 100], (unsigned long long)of_timed[timed / 2],
           (unsigned long long)of_timed[timed * 99 / 100]);
    return 0;
}
