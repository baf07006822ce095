/* Modules, libraries and their functions. The end of a function's name is its duration:
 * `matmul_250us`. A name without such an end takes no time. */
#ifndef STANDIN_MODULES_H
#define STANDIN_MODULES_H

#include "objects.h"

struct module {
    struct object object; /* a library's context is NULL */
    uint32_t loaded;      /* bit per GPU that holds it */
};

struct function {
    struct object object;
    struct module *module;
    char *name;
    uint64_t ns;
    unsigned block[3];
};

/* A library is loaded on the GPU that first uses a function of it. Needs the lock. */
CUresult module_load_on(struct module *module, unsigned gpu);
void module_release(struct module *module);

#endif
