/*
 * The driver's library for programs that know it by its name alone, as those in Python do.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int launch_function(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void *, void **, void **);

static void *library;

static inline void *find(const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return found;
}

static inline void check(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s answered %d\n", what, result);
        exit(3);
    }
}

/* Call a function of these parameters, which must succeed. */
#define CALL(NAME, PARAMETERS, ...) check(((int (*) PARAMETERS)find(#NAME))(__VA_ARGS__), #NAME)

/* Functions are of this library from now on. */
static inline void load(const char *name)
{
    library = dlopen(name, RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
}

static inline void load_driver(void)
{
    load("libcuda.so.1");
}

/* With the first GPU's context current. */
static inline void start_driver(void)
{
    void *context;

    CALL(cuInit, (unsigned), 0);
    CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, 0);
    CALL(cuCtxSetCurrent, (void *), context);
}

static inline void *function_of(const char *image, const char *name)
{
    void *module, *function;

    CALL(cuModuleLoadData, (void **, const void *), &module, image);
    CALL(cuModuleGetFunction, (void **, void *, const char *), &function, module, name);
    return function;
}
