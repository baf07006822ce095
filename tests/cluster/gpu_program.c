/*
 * A program that uses CUDA, as one in Python does: it knows the driver by the names of its
 * libraries alone.
 *
 *   python launch KERNEL   launches a kernel again and again; its name ends in how long it takes
 *   python ...             allocates memory until that is refused, and keeps it
 *
 * Each prints a line once it has begun, or allocated, and ends at SIGTERM. The line of the second is
 * a JSON object: bytes, the number of GPUs, and the driver's last answer.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

struct memory {
    unsigned long long total, free, used;
};

static void *find(void *library, const char *name)
{
    void *found = library ? dlsym(library, name) : NULL;

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

static void end(int number)
{
    (void)number;
    _exit(0);
}

static void use_first_gpu(void *cuda)
{
    void *context;

    check(((int (*)(unsigned))find(cuda, "cuInit"))(0), "cuInit");
    check(((int (*)(void **, int))find(cuda, "cuDevicePrimaryCtxRetain"))(&context, 0),
          "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))find(cuda, "cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
}

static void launch(void *cuda, const char *kernel)
{
    void *module, *function;
    int (*load)(void **, const void *) = find(cuda, "cuModuleLoadData");
    int (*get)(void **, void *, const char *) = find(cuda, "cuModuleGetFunction");
    int (*start)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                 void *, void **, void **) = find(cuda, "cuLaunchKernel");

    check(load(&module, "image"), "cuModuleLoadData");
    check(get(&function, module, kernel), "cuModuleGetFunction");
    puts("begins");
    fflush(stdout);
    for (;;)
        check(start(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
}

static void fill(void *cuda)
{
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    int gpus, result;
    size_t total, free_now, whole, allocated = 0;
    struct memory memory;
    unsigned long long pointer;
    int (*allocate)(unsigned long long *, size_t) = find(cuda, "cuMemAlloc_v2");

    check(((int (*)(int *))find(cuda, "cuDeviceGetCount"))(&gpus), "cuDeviceGetCount");
    check(((int (*)(size_t *, int))find(cuda, "cuDeviceTotalMem_v2"))(&total, 0),
          "cuDeviceTotalMem");
    while ((result = allocate(&pointer, 16 * MIB)) == 0)
        allocated += 16 * MIB;
    check(((int (*)(size_t *, size_t *))find(cuda, "cuMemGetInfo_v2"))(&free_now, &whole),
          "cuMemGetInfo");
    check(((int (*)(void))find(nvml, "nvmlInit_v2"))(), "nvmlInit");
    check(((int (*)(unsigned, void **))find(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device),
          "nvmlDeviceGetHandleByIndex");
    check(((int (*)(void *, struct memory *))find(nvml, "nvmlDeviceGetMemoryInfo"))(device, &memory),
          "nvmlDeviceGetMemoryInfo");
    printf("{\"gpus\": %d, \"total\": %zu, \"allocated\": %zu, \"refused\": %d, \"free\": %zu, "
           "\"nvml_total\": %llu, \"nvml_used\": %llu}\n",
           gpus, total, allocated, result, free_now, memory.total, memory.used);
    fflush(stdout);
    for (;;)
        pause();
}

int main(int count, char **arguments)
{
    signal(SIGTERM, end); /* the first process of a container ignores it otherwise */
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);

    use_first_gpu(cuda);
    if (count == 3 && strcmp(arguments[1], "launch") == 0)
        launch(cuda, arguments[2]);
    fill(cuda);
}
