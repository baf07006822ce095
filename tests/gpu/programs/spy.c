/*
 * In place of libcuda.so.1: hands every question for an address to the library that SPIED names, and writes
 * a line for each into the file that SPIED_LOG names: name, version, flags, what was found there by that name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int address_function(const char *, void **, int, uint64_t, int *);
typedef int address_function_v1(const char *, void **, int, uint64_t);

static void *library;
static FILE *file;
static address_function *real;
static address_function_v1 *real_v1;

int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
int cuGetProcAddress(const char *, void **, int, uint64_t);
int cuDriverGetVersion(int *);

static void open_once(void)
{
    if (library)
        return;
    library = dlopen(getenv("SPIED"), RTLD_NOW);
    file = fopen(getenv("SPIED_LOG"), "w");
    if (!library || !file)
        abort();
    real = (address_function *)dlsym(library, "cuGetProcAddress_v2");
    real_v1 = (address_function_v1 *)dlsym(library, "cuGetProcAddress");
}

/* The library that an address is in, and its symbol there. */
static void note(const char *name, int version, uint64_t flags, int result, void **found)
{
    Dl_info of = {0};

    if (result == 0 && found && *found)
        dladdr(*found, &of);
    fprintf(file, "%s\t%d\t%d\t%s\t%s\n", name, version, (int)flags, of.dli_fname ? of.dli_fname : "",
            of.dli_sname ? of.dli_sname : "");
    fflush(file);
}

/* Asked for itself, it stays between. */
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    open_once();
    int result = real(name, found, version, flags, status);

    note(name, version, flags, result, found);
    if (result == 0 && found && *found == (void *)real)
        *found = (void *)cuGetProcAddress_v2;
    return result;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    open_once();
    int result = real_v1(name, found, version, flags);

    note(name, version, flags, result, found);
    if (result == 0 && found && *found == (void *)real_v1)
        *found = (void *)cuGetProcAddress;
    return result;
}

/* CUDA 13 asks for this by dlsym(3), too. */
int cuDriverGetVersion(int *version)
{
    open_once();
    return ((int (*)(int *))dlsym(library, "cuDriverGetVersion"))(version);
}
