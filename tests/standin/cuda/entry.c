/* Entry points of the stand-in for libcuda: the beginning of every export, cuInit, and
 * cuGetProcAddress. */
#define _GNU_SOURCE
#include "objects.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Only their addresses are used here; their prototypes are those of their definitions. */
#define EXPORT(base, version, symbol, per_thread) extern char address_of_##symbol[] __asm__(#symbol);
#include "exports.def"
#include "unsupported.def"
#undef EXPORT

static const struct {
    const char *base, *symbol;
    int version, per_thread;
    void *address;
} exports[] = {
#define EXPORT(base, version, symbol, per_thread)                                                  \
    {#base, #symbol, version, per_thread, address_of_##symbol},
#include "exports.def"
#include "unsupported.def"
#undef EXPORT
};

enum { MOST_FAILURES = 64, KILL = -1, GET_PROC_PER_THREAD = 2, GET_PROC_FLAGS = 3 };

struct failure {
    enum export export;
    uint32_t nth;
    CUresult result;
};

static uint64_t latency[EXPORTS];
static struct failure failures[MOST_FAILURES];
static unsigned failure_count;
static uint32_t own_calls[EXPORTS]; /* of this process since its start or its fork */
static int initialised, forked;

static int export_named(const char *symbol)
{
    for (int i = 0; i < EXPORTS; i++)
        if (strcmp(exports[i].symbol, symbol) == 0)
            return i;
    fprintf(stderr, "stand-in: there is no export %s\n", symbol);
    abort();
}

static void read_faults(const struct node *node)
{
    uint64_t all = json_number(node->latency_ns, "*", 0);
    for (int i = 0; i < EXPORTS; i++)
        latency[i] = json_number(node->latency_ns, exports[i].symbol, all);
    const struct json *one = node->failures ? node->failures->first : NULL;
    for (; one != NULL && failure_count < MOST_FAILURES; one = one->next) {
        int kill = strcmp(json_text(one, "result", ""), "kill") == 0;
        failures[failure_count++] = (struct failure){
            (enum export)export_named(json_text(one, "call", "")),
            (uint32_t)json_number(one, "nth", 1),
            kill ? KILL : (CUresult)json_number(one, "result", UNKNOWN),
        };
    }
}

static void after_fork(void)
{
    /* CUDA cannot be used in the child of a process that uses it. */
    forked = initialised;
    memset(own_calls, 0, sizeof own_calls);
}

static void unlock_after_fork(void)
{
    objects_unlock(NULL);
}

static void unlock_child(void)
{
    objects_unlock(NULL);
    after_fork();
}

__attribute__((constructor)) static void load(void)
{
    const struct node *node = node_get();
    if (node == NULL)
        return;
    if (ledger_open(node->state, node->slice_ns, node->sample_ns) != 0) {
        perror(node->state);
        return;
    }
    read_faults(node);
    ledger_join();
    pthread_atfork(objects_lock, unlock_after_fork, unlock_child);
}

static void delay(uint64_t ns)
{
    struct timespec end, now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    end.tv_sec = now.tv_sec + (time_t)((uint64_t)now.tv_nsec + ns) / 1000000000;
    end.tv_nsec = (long)(((uint64_t)now.tv_nsec + ns) % 1000000000);
    if (ns >= 50000) {
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
        return;
    }
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
}

CUresult enter(enum export export, int needs_init)
{
    if (ledger_own == NULL)
        return needs_init ? NOT_INITIALIZED : SUCCESS;
    __atomic_add_fetch(&ledger_own->calls[export], 1, __ATOMIC_RELAXED);
    uint32_t nth = __atomic_add_fetch(&own_calls[export], 1, __ATOMIC_RELAXED);
    if (latency[export] != 0)
        delay(latency[export]);
    for (unsigned i = 0; i < failure_count; i++) {
        if (failures[i].export != export || failures[i].nth != nth)
            continue;
        if (failures[i].result == KILL)
            raise(SIGKILL);
        return failures[i].result;
    }
    if (needs_init && (forked || !__atomic_load_n(&initialised, __ATOMIC_ACQUIRE)))
        return NOT_INITIALIZED;
    return SUCCESS;
}

PUBLIC CUresult cuInit(unsigned flags)
{
    ENTER_EARLY(cuInit);
    if (flags != 0)
        return INVALID_VALUE;
    if (node_get() == NULL)
        return NO_DEVICE;
    if (ledger_own == NULL)
        return UNKNOWN;
    if (forked)
        return NOT_INITIALIZED;
    LOCKED;
    visible_read();
    if (visible_count() == 0)
        return NO_DEVICE;
    ledger_own->initialised = 1;
    __atomic_store_n(&initialised, 1, __ATOMIC_RELEASE);
    return SUCCESS;
}

PUBLIC CUresult cuDriverGetVersion(int *version)
{
    ENTER_EARLY(cuDriverGetVersion);
    if (version == NULL)
        return INVALID_VALUE;
    *version = node_get() ? (int)node_get()->cuda : 0;
    return SUCCESS;
}

/* The newest ABI of `base` that is not newer than `version`. Returns 0 if found, 1 for an unknown
 * name, 2 if all are newer. If the flags ask for per-thread variants, these count too, and win
 * over the other variant of their version. */
static int find_entry(const char *base, int version, uint64_t flags, void **found)
{
    int best = -1, named = 0;
    for (int i = 0; i < EXPORTS; i++) {
        if (strcmp(exports[i].base, base) != 0)
            continue;
        named = 1;
        if (exports[i].version > version)
            continue;
        if (exports[i].per_thread && !(flags & GET_PROC_PER_THREAD))
            continue;
        if (best < 0 || exports[i].version > exports[best].version ||
            (exports[i].version == exports[best].version && exports[i].per_thread))
            best = i;
    }
    *found = best < 0 ? NULL : exports[best].address;
    return best >= 0 ? 0 : named ? 2 : 1;
}

static CUresult get_proc_address(const char *symbol, void **function, int version, uint64_t flags,
                                 int *status)
{
    if (symbol == NULL || function == NULL || (flags & ~(uint64_t)GET_PROC_FLAGS) ||
        flags == GET_PROC_FLAGS)
        return INVALID_VALUE;
    if (node_get() != NULL && version > (int)node_get()->cuda)
        return INVALID_VALUE;
    *status = find_entry(symbol, version, flags, function);
    if (*status != 0 && ledger_own != NULL)
        __atomic_add_fetch(&ledger_own->not_found, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

/* The form of CUDA 11.3: an unknown name is an error. */
PUBLIC CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    ENTER_EARLY(cuGetProcAddress);
    int status;
    TRY(get_proc_address(symbol, function, version, flags, &status));
    return status == 0 ? SUCCESS : NOT_FOUND;
}

/* The form of CUDA 12: an unknown name gives NULL, and the status gives the reason. */
PUBLIC CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                                    int *status)
{
    ENTER_EARLY(cuGetProcAddress_v2);
    int found;
    TRY(get_proc_address(symbol, function, version, flags, &found));
    if (status != NULL)
        *status = found;
    return SUCCESS;
}

/* A table that only this driver has; the runtime's own tables are not simulated. */
static const void *const own_table[2] = {(void *)16, address_of_cuDriverGetVersion};

PUBLIC CUresult cuGetExportTable(const void **table, const unsigned char uuid[16])
{
    static const char own_uuid[16] = "stand-in's table";
    ENTER_EARLY(cuGetExportTable);
    if (table == NULL || uuid == NULL)
        return INVALID_VALUE;
    if (memcmp(uuid, own_uuid, sizeof own_uuid) != 0)
        return NOT_FOUND;
    *table = own_table;
    return SUCCESS;
}

/* Known entry points that are not simulated: each has its own address. */
#define EXPORT(base, version, symbol, per_thread)                                                  \
    PUBLIC CUresult symbol(void);                                                                  \
    PUBLIC CUresult symbol(void)                                                                   \
    {                                                                                              \
        ENTER_EARLY(symbol);                                                                       \
        return NOT_SUPPORTED;                                                                      \
    }
#include "unsupported.def"
#undef EXPORT
