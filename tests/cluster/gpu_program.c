/*
 * A program that uses CUDA as a Python program does: it knows only the names of the driver's
 * libraries.
 *
 *   python launch KERNEL   launches a kernel again and again; its name ends in how long it takes
 *   python ...             allocates memory until that is refused, and keeps it
 *
 * Each prints a line once it has begun, or allocated, and ends at SIGTERM. The line of the second is
 * a JSON object: bytes, the number of GPUs, and the driver's last answer.
 */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "../gpu/programs/driver.h"

enum { MIB = 1 << 20 };

struct memory {
    unsigned long long total, free, used;
};

static void end(int number)
{
    (void)number;
    _exit(0);
}

static void launch(const char *kernel)
{
    void *function = function_of("image", kernel);
    launch_function *start = (launch_function *)find("cuLaunchKernel");

    puts("begins");
    fflush(stdout);
    for (;;)
        check(start(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
}

static void fill(void)
{
    void *device;
    int gpus, result;
    size_t total, free_now, whole, allocated = 0;
    struct memory memory;
    unsigned long long pointer;
    int (*allocate)(unsigned long long *, size_t) =
        (int (*)(unsigned long long *, size_t))find("cuMemAlloc_v2");

    CALL(cuDeviceGetCount, (int *), &gpus);
    CALL(cuDeviceTotalMem_v2, (size_t *, int), &total, 0);
    while ((result = allocate(&pointer, 16 * MIB)) == 0)
        allocated += 16 * MIB;
    CALL(cuMemGetInfo_v2, (size_t *, size_t *), &free_now, &whole);
    load("libnvidia-ml.so.1");
    CALL(nvmlInit_v2, (void));
    CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned, void **), 0, &device);
    CALL(nvmlDeviceGetMemoryInfo, (void *, struct memory *), device, &memory);
    printf("{\"gpus\": %d, \"total\": %zu, \"allocated\": %zu, \"refused\": %d, \"free\": %zu, "
           "\"nvml_total\": %llu, \"nvml_used\": %llu}\n",
           gpus, total, allocated, result, free_now, memory.total, memory.used);
    fflush(stdout);
    for (;;)
        pause();
}

int main(int count, char **arguments)
{
    signal(SIGTERM, end); /* without this, the first process of a container ignores SIGTERM */
    load_driver();
    start_driver();
    if (count == 3 && strcmp(arguments[1], "launch") == 0)
        launch(arguments[2]);
    fill();
}
