/*
 * Launches one kernel after the other on the first device, until standard input ends:
 *
 *   launches KERNEL
 *
 * KERNEL is a function's name, which ends in how long it takes: work_5ms. Prints a line when it
 * begins. Each line that it reads stops it until the next one.
 */
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

/* The next line, if there is one or `wait`; false at the end. */
static int read_line(int wait, int *read_one)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char byte;

    *read_one = 0;
    if (poll(&input, 1, wait ? -1 : 0) <= 0)
        return 1;
    if (read(STDIN_FILENO, &byte, 1) <= 0)
        return 0;
    *read_one = 1;
    return 1;
}

int main(int count, char **arguments)
{
    void *context, *module, *function;
    int pause;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (count != 2 || !library)
        return 2;
    check(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
    check(((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0),
          "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    check(((int (*)(void **, const void *))find("cuModuleLoadData"))(&module, "image"),
          "cuModuleLoadData");
    int (*get_function)(void **, void *, const char *) = find("cuModuleGetFunction");

    check(get_function(&function, module, arguments[1]), "cuModuleGetFunction");
    launch_kernel launch = (launch_kernel)find("cuLaunchKernel");

    puts("begins");
    fflush(stdout);
    while (read_line(0, &pause)) {
        if (pause && !read_line(1, &pause))
            break;
        check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
    }
    return 0;
}
