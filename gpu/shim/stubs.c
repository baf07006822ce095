/* The exports of libcuda.so.1: a function for each row of the table in hooks.h. The driver is loaded
   with the shim (DT_NEEDED), so programs find its other symbols there. */
#include "hooks.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "old_glibc.h"
#include "say.h"

#define REAL_LIBRARY "libpfcuda-real.so.1"

/* Above 0 the driver or a hook calls an export. Only a program's own calls count. */
static __thread int depth __attribute__((tls_model("initial-exec")));

struct driver driver;

#define STUB(NAME, ABI, ACT)                                                              \
    __attribute__((visibility("default"))) int NAME(PARAMS_##ABI);                        \
    int NAME(PARAMS_##ABI)                                                                \
    {                                                                                     \
        const struct hook *hook = &hooks[HOOK_##NAME];                                    \
                                                                                          \
        if (__builtin_expect(!hook->real, 0))                                             \
            return CU_NOT_FOUND;                                                          \
        if (depth > 0)                                                                    \
            return REAL(hook, ABI)(ARGS_##ABI);                                           \
        depth++;                                                                          \
        int result = ACT(hook, ARGS_##ABI);                                               \
        depth--;                                                                          \
        return result;                                                                    \
    }
HOOKS(STUB)
#undef STUB

struct hook hooks[HOOK_COUNT] = {
#define ENTRY(NAME, ABI, ACT) [HOOK_##NAME] = {.name = #NAME, .stub = (void *)NAME},
    HOOKS(ENTRY)
#undef ENTRY
};

/* Before any function of the driver can be called. Without the real functions each one fails. */
__attribute__((constructor)) static void load(void)
{
    void *library = dlopen(REAL_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);

    if (!library) {
        say("the driver is not loaded as " REAL_LIBRARY ": no GPU can be used");
        return;
    }
#define FIND(NAME, PARAMETERS) driver.NAME = (__typeof__(driver.NAME))dlsym(library, #NAME);
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    for (size_t i = 0; i < HOOK_COUNT; i++) {
        size_t length = strlen(hooks[i].name);

        hooks[i].real = dlsym(library, hooks[i].name);
        hooks[i].per_thread = length > 5 && strcmp(hooks[i].name + length - 5, "_ptsz") == 0;
        if (hooks[i].real == hooks[i].stub)
            hooks[i].real = NULL; /* never call ourselves */
    }
}
