/* cuGetProcAddress, from which the CUDA runtime gets every function of the driver (since 11.3). If an
   address from the driver has a hook, the shim returns the hook's address instead. */
#include "hooks.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "old_glibc.h"
#include "process.h"
#include "say.h"

static unsigned short by_address[HOOK_COUNT];  /* indices of hooks, sorted by `real` */
static unsigned char base_lengths[HOOK_COUNT]; /* of the hooks' names */
static pthread_once_t sorted = PTHREAD_ONCE_INIT;

static int compare(const void *left, const void *right)
{
    uintptr_t a = (uintptr_t)hooks[*(const unsigned short *)left].real;
    uintptr_t b = (uintptr_t)hooks[*(const unsigned short *)right].real;

    return (a > b) - (a < b);
}

/* The length of an exported name without _v2, _ptsz and the like, as in calls of cuGetProcAddress. */
static size_t base_length(const char *name)
{
    size_t length = strlen(name);

    for (;;) {
        if (length > 5 && (strncmp(name + length - 5, "_ptsz", 5) == 0 ||
                           strncmp(name + length - 5, "_ptds", 5) == 0))
            length -= 5;
        else if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v' &&
                 name[length - 1] >= '0' && name[length - 1] <= '9')
            length -= 3;
        else
            return length;
    }
}

static void sort(void)
{
    for (unsigned short i = 0; i < HOOK_COUNT; i++) {
        by_address[i] = i;
        base_lengths[i] = (unsigned char)base_length(hooks[i].name);
    }
    qsort(by_address, HOOK_COUNT, sizeof by_address[0], compare);
}

static bool same_base(size_t hook, const char *symbol, size_t length)
{
    return base_lengths[hook] == length && memcmp(hooks[hook].name, symbol, length) == 0;
}

/* The hook for an address of the driver. If two exports are one function, their names decide. */
static const struct hook *hook_at(const void *address, const char *symbol, size_t length)
{
    size_t low = 0, high = HOOK_COUNT;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if ((uintptr_t)hooks[by_address[middle]].real < (uintptr_t)address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == HOOK_COUNT || hooks[by_address[low]].real != address)
        return NULL;
    for (size_t i = low; i < HOOK_COUNT && hooks[by_address[i]].real == address; i++)
        if (same_base(by_address[i], symbol, length))
            return &hooks[by_address[i]];
    return &hooks[by_address[low]];
}

static bool is_hooked(const char *symbol, size_t length)
{
    for (size_t i = 0; i < HOOK_COUNT; i++)
        if (same_base(i, symbol, length))
            return true;
    return false;
}

/* A driver without bound symbols returns the shim's address itself. */
static bool is_ours(const void *address)
{
    for (size_t i = 0; i < HOOK_COUNT; i++)
        if (hooks[i].stub == address)
            return true;
    return false;
}

/* Replace an address from the driver. False: the shim does not know this version of a hooked function. */
static bool answer(const char *symbol, void **function)
{
    pthread_once(&sorted, sort);
    size_t length = base_length(symbol);
    const struct hook *hook = hook_at(*function, symbol, length);

    if (hook) {
        *function = hook->stub;
        return true;
    }
    if (!is_hooked(symbol, length) || is_ours(*function))
        return true;
    if (process)
        COMPLAIN("the driver's newest version of %s is unknown to this library and is not handed out",
                 symbol);
    *function = NULL;
    return false;
}

int on_address(const struct hook *hook, PARAMS_address)
{
    int result = REAL(hook, address)(ARGS_address);

    if (result == CU_SUCCESS && symbol && function && *function && !answer(symbol, function))
        return CU_NOT_FOUND;
    return result;
}

int on_address_v2(const struct hook *hook, PARAMS_address_v2)
{
    int result = REAL(hook, address_v2)(ARGS_address_v2);

    if (result != CU_SUCCESS || (status && *status != 0) || !symbol || !function || !*function)
        return result;
    if (answer(symbol, function))
        return CU_SUCCESS;
    if (!status)
        return CU_NOT_FOUND;
    *status = CU_VERSION_NOT_SUFFICIENT;
    return CU_SUCCESS;
}
