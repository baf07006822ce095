/* Modules, libraries and their functions. A function runs for as long as the end of its name says:
 * `matmul_250us`; without such an end it takes no time. */
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

/* A library is loaded where a function of it is first used. Needs the lock. */
CUresult module_load_on(struct module *module, unsigned gpu);
void module_release(struct module *module);

#endif
