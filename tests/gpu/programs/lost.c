/*
 * Two threads find that their process' slot is lost, as when the agent took it for dead. The second one
 * goes on only after the first one has a new slot, and has allocated there. Ends with 0 unless a call
 * fails.
 *
 *   lost REGION     the file that has slots, and the first one is the process'
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpu/shim/layout.h"

static void *library;
static void *context;
static pthread_t second;
static atomic_bool begun, done;

static int call(const char *symbol, uint64_t first, uint64_t next)
{
    int (*function)(uint64_t, uint64_t) = (int (*)(uint64_t, uint64_t))dlsym(library, symbol);

    return function ? function(first, next) : -1;
}

static void wait_until(atomic_bool *reached)
{
    while (!*reached)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* The shim's tests are built to call this (gpu/shim/process.h, STEP). */
void pf_step(const char *name)
{
    if (strcmp(name, "slot lost") != 0 || !pthread_equal(pthread_self(), second))
        return;
    begun = true;
    wait_until(&done);
}

static void *allocate(void *result)
{
    uint64_t pointer;

    second = pthread_self();
    *(int *)result = call("cuCtxSetCurrent", (uintptr_t)context, 0) ||
                     call("cuMemAlloc_v2", (uintptr_t)&pointer, 1 << 20);
    return NULL;
}

int main(int count, char **arguments)
{
    struct pf_slot lost = {0};
    pthread_t thread;
    uint64_t pointer;
    int failed = 0;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    int region = count == 2 ? open(arguments[1], O_RDWR) : -1;

    if (!library || region < 0 || call("cuInit", 0, 0) ||
        call("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0) ||
        call("cuCtxSetCurrent", (uintptr_t)context, 0) ||
        call("cuMemAlloc_v2", (uintptr_t)&pointer, 1 << 20))
        return 2;
    if (pwrite(region, &lost, sizeof lost, offsetof(struct pf_region, slot)) != sizeof lost ||
        pthread_create(&thread, NULL, allocate, &failed) != 0)
        return 3;
    wait_until(&begun);
    if (call("cuMemAlloc_v2", (uintptr_t)&pointer, 1 << 20))
        return 4;
    done = true;
    pthread_join(thread, NULL);
    return failed;
}
