/*
 * Reaches the driver in the way that its argument names, allocates 1 MiB, launches a kernel and waits for
 * the end of its input. Built with -DLINKED it is linked with libcuda.so.1, else it knows it by name alone.
 *
 *   route linked | next | default | dlopen NAME FLAGS | dlmopen NAME | dlvsym NAME | address FLAGS
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int init_function(unsigned);
typedef int retain_function(void **, int);
typedef int current_function(void *);
typedef int alloc_function(uint64_t *, size_t);
typedef int module_function(void **, const void *);
typedef int function_function(void **, void *, const char *);
typedef int launch_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void *, void **, void **);
typedef void *lookup_function(void *, const char *);
typedef int address_function(const char *, void **, int, uint64_t, int *);
typedef int address_function_v1(const char *, void **, int, uint64_t);

#ifdef LINKED
extern init_function cuInit;
#endif

static void *handle;
static const char *route;
static uint64_t flags;

static void *must(void *found, const char *what)
{
    if (!found) {
        fprintf(stderr, "%s: %s\n", what, dlerror());
        exit(3);
    }
    return found;
}

/* The function that cuGetProcAddress returns, in both versions, after it has returned itself. */
static void *through_itself(const char *name, int version)
{
    address_function *ask = (address_function *)must(dlsym(handle, "cuGetProcAddress_v2"), "v2");
    address_function_v1 *first = (address_function_v1 *)must(dlsym(handle, "cuGetProcAddress"), "v1");
    void *again = NULL, *first_again = NULL, *found = NULL, *found_first = NULL;
    int status = -1;

    if (ask("cuGetProcAddress", &again, 12000, flags, &status) != 0 || status != 0 ||
        ask("cuGetProcAddress", &first_again, 11030, flags, &status) != 0 || status != 0)
        exit(4);
    if (((address_function *)again)(name, &found, version, flags, NULL) != 0 ||
        ((address_function_v1 *)first_again)(name, &found_first, version, flags) != 0 ||
        first(name, &found_first, version, flags) != 0)
        exit(5);
    if (found != found_first)
        exit(6);
    return found;
}

/* As the CUDA runtime finds dlsym(3); and the driver's functions have no versions to be found by. */
static void *by_version(const char *symbol)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    void *look_up = NULL;

    for (int i = 0; i < 3 && !look_up; i++)
        look_up = dlvsym(RTLD_DEFAULT, "dlsym", versions[i]);
    void *found = ((lookup_function *)must(look_up, "dlsym"))(handle, symbol);
    void *versioned = dlvsym(handle, symbol, "libcuda.so.1");

    if (versioned && versioned != found)
        exit(9);
    return found;
}

static void *find(const char *base, const char *symbol, int version)
{
    if (strcmp(route, "address") == 0)
        return must(through_itself(base, version), base);
    if (strcmp(route, "dlvsym") == 0)
        return must(by_version(symbol), symbol);
    void *found = must(dlsym(handle, symbol), symbol);
    if (dlsym(handle, symbol) != found)
        exit(8);
    return found;
}

/* Launch a kernel that takes no time to speak of. */
static void launch(void)
{
    void *module = NULL, *function = NULL;

    if (((module_function *)find("cuModuleLoadData", "cuModuleLoadData", 2000))(&module, "image") != 0 ||
        ((function_function *)find("cuModuleGetFunction", "cuModuleGetFunction", 2000))(
            &function, module, "work_1us") != 0 ||
        ((launch_function *)find("cuLaunchKernel", "cuLaunchKernel", 7000))(
            function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
        exit(10);
}

int main(int count, char **arguments)
{
    uint64_t pointer = 0;
    void *context = NULL;
    char byte;

    route = arguments[1];
    handle = RTLD_DEFAULT;
    if (strcmp(route, "next") == 0)
        handle = RTLD_NEXT;
    else if (strcmp(route, "dlopen") == 0)
        handle = must(dlopen(arguments[2], atoi(arguments[3])), arguments[2]);
    else if (strcmp(route, "dlvsym") == 0)
        handle = must(dlopen(arguments[2], RTLD_NOW), arguments[2]);
    else if (strcmp(route, "default") == 0)
        must(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), "libcuda.so.1");
    else if (strcmp(route, "dlmopen") == 0)
        handle = must(dlmopen(LM_ID_NEWLM, arguments[2], RTLD_NOW), arguments[2]);
    else if (strcmp(route, "address") == 0) {
        handle = must(dlopen("libcuda.so.1", RTLD_NOW), "libcuda.so.1");
        flags = strtoull(arguments[2], NULL, 10);
    }
#ifdef LINKED
    int result = cuInit(0);
#else
    int result = ((init_function *)find("cuInit", "cuInit", 2000))(0);
#endif
    if (result != 0)
        return result;
    if (((retain_function *)find("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000))(
            &context, 0) != 0 ||
        ((current_function *)find("cuCtxSetCurrent", "cuCtxSetCurrent", 4000))(context) != 0 ||
        ((alloc_function *)find("cuMemAlloc", "cuMemAlloc_v2", 3020))(&pointer, 1 << 20) != 0)
        return 7;
    launch();
    puts("ready");
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    return count < 0;
}
