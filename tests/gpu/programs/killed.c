/*
 * Allocates and frees, and kills itself at the step of the shim that its argument counts to. Prints each
 * step's name before. Ends with 0 if there are fewer steps.
 *
 *   killed STEP
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int left;

/* The shim's tests are built to call this (gpu/shim/process.h, STEP). */
void pf_step(const char *name)
{
    if (--left != 0)
        return;
    if (write(STDOUT_FILENO, name, strlen(name)) < 0)
        _exit(9);
    kill(getpid(), SIGKILL);
}

static int call(void *library, const char *symbol, uint64_t first, uint64_t second)
{
    int (*function)(uint64_t, uint64_t) = (int (*)(uint64_t, uint64_t))dlsym(library, symbol);

    return function ? function(first, second) : -1;
}

int main(int count, char **arguments)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    uint64_t context = 0, pointer[4] = {0};

    if (count < 2 || !library)
        return 2;
    left = atoi(arguments[1]);
    int result = call(library, "cuInit", 0, 0);

    result = result ? result : call(library, "cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0);
    result = result ? result : call(library, "cuCtxSetCurrent", context, 0);
    for (int i = 0; i < 4 && !result; i++)
        result = call(library, "cuMemAlloc_v2", (uintptr_t)&pointer[i], 1 << 20);
    for (int i = 0; i < 4 && !result; i++)
        result = call(library, "cuMemFree_v2", pointer[i], 0);
    return result;
}
