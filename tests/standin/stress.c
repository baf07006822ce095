/* A program that allocates and frees at random in several threads until it is told to stop.
 *
 *     stress THREADS SEED
 *
 * It prints a line when all threads work. When its standard input ends, the threads stop, and it prints
 * the bytes that it still holds, by its own count; it keeps them until standard input's end is followed by
 * SIGTERM. A result that is neither success nor "out of memory" ends it with a message. */
#define _GNU_SOURCE
#include "cuda_abi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_HELD = 64, BLOCK = 512, LARGEST = 64 << 20 };

extern CUresult cuInit(unsigned flags);
extern CUresult cuDevicePrimaryCtxRetain(CUhandle *context, CUdevice device);
extern CUresult cuCtxSetCurrent(CUhandle context);
extern CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
extern CUresult cuMemFree_v2(CUdeviceptr pointer);
extern CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUhandle stream);
extern CUresult cuMemFreeAsync(CUdeviceptr pointer, CUhandle stream);
extern CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);

static CUhandle context;
static int stop;
static unsigned seed;
static pthread_barrier_t ready;

static void must(CUresult result, const char *call)
{
    if (result == SUCCESS)
        return;
    fprintf(stderr, "%s answered %d\n", call, result);
    abort();
}

/* Returns the bytes held at the end, not counting those from a pool, which are all freed. */
static void *work(void *number)
{
    struct {
        CUdeviceptr pointer;
        size_t bytes;
    } held[MOST_HELD] = {0};
    unsigned random = seed * 1000 + (unsigned)(uintptr_t)number;
    size_t sum = 0, free_bytes, total;
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    pthread_barrier_wait(&ready);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        unsigned place = (unsigned)rand_r(&random) % MOST_HELD;
        if (held[place].pointer != 0) {
            must(cuMemFree_v2(held[place].pointer), "cuMemFree_v2");
            held[place].pointer = 0;
            continue;
        }
        size_t bytes = (size_t)rand_r(&random) % (LARGEST / BLOCK) * BLOCK + BLOCK;
        CUdeviceptr pointer;
        CUresult result = cuMemAlloc_v2(&pointer, bytes);
        if (result == SUCCESS) {
            held[place].pointer = pointer;
            held[place].bytes = bytes;
        } else if (result != OUT_OF_MEMORY) {
            must(result, "cuMemAlloc_v2");
        }
        must(cuMemGetInfo_v2(&free_bytes, &total), "cuMemGetInfo_v2");
        result = cuMemAllocAsync(&pointer, bytes, NULL);
        if (result == SUCCESS)
            must(cuMemFreeAsync(pointer, NULL), "cuMemFreeAsync");
        else if (result != OUT_OF_MEMORY)
            must(result, "cuMemAllocAsync");
    }
    for (unsigned place = 0; place < MOST_HELD; place++)
        if (held[place].pointer != 0)
            sum += held[place].bytes;
    return (void *)sum;
}

int main(int count, char **arguments)
{
    pthread_t threads[64];
    char byte;
    size_t sum = 0;
    unsigned number = count == 3 ? (unsigned)atoi(arguments[1]) : 0;
    if (number == 0 || number > 64) {
        fprintf(stderr, "usage: stress THREADS SEED\n");
        return 2;
    }
    seed = (unsigned)atoi(arguments[2]);
    must(cuInit(0), "cuInit");
    must(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    pthread_barrier_init(&ready, NULL, number + 1);
    for (unsigned i = 0; i < number; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i);
    pthread_barrier_wait(&ready);
    puts("working");
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        continue;
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < number; i++) {
        void *bytes;
        pthread_join(threads[i], &bytes);
        sum += (size_t)bytes;
    }
    printf("%zu\n", sum);
    fflush(stdout);
    pause();
}
