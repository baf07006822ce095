#define _GNU_SOURCE
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const uint64_t MAGIC = 0x3174736e64617473; /* changes with the layout */

enum { PATIENCE_S = 100 };

struct ledger *ledger;
struct slot *ledger_own;
static char *ledger_path;
static int pids_file = -1; /* never closed: that would drop this process' locks */
int ledger_file = -1;

static void make(struct ledger *fresh)
{
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&fresh->mutex, &shared);
    __atomic_store_n(&fresh->magic, MAGIC, __ATOMIC_RELEASE);
}

static int open_pids(void)
{
    char *path = NULL;
    if (asprintf(&path, "%s.pids", ledger_path) < 0)
        return -1;
    pids_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (pids_file >= 0)
        fchmod(pids_file, 0666);
    free(path);
    return pids_file < 0 ? -1 : 0;
}

int ledger_open(const char *path, uint64_t slice_ns, uint64_t sample_ns)
{
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0)
        return -1;
    fchmod(file, 0666); /* other users' processes map it too; fails on another user's file */
    struct ledger *mapped = MAP_FAILED;
    flock(file, LOCK_EX); /* until it is initialised; if the maker dies, the magic stays unset */
    if (ftruncate(file, sizeof *mapped) == 0)
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED && mapped->magic == 0)
        make(mapped);
    flock(file, LOCK_UN);
    if (mapped == MAP_FAILED) {
        close(file);
        return -1;
    }
    if (mapped->magic != MAGIC) {
        fprintf(stderr, "stand-in: %s was made by another version\n", path);
        abort();
    }
    mapped->slice_ns = slice_ns;
    mapped->sample_ns = sample_ns;
    close(file);
    /* A second open file: a mapping keeps its own file open, even in a forked child. */
    ledger_file = open(path, O_RDWR | O_CLOEXEC);
    if (ledger_file < 0)
        return -1;
    ledger_path = strdup(path);
    ledger = mapped;
    return open_pids();
}

static int lock_byte(int command, unsigned slot, short *type)
{
    struct flock lock = {.l_type = *type, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    int result = fcntl(ledger_file, command, &lock);
    *type = lock.l_type;
    return result;
}

int ledger_alive(unsigned slot)
{
    if (!ledger->slots[slot].taken)
        return 0;
    if (ledger_own == &ledger->slots[slot])
        return 1; /* a process does not see its own lock */
    short type = F_WRLCK;
    return lock_byte(F_OFD_GETLK, slot, &type) == 0 && type != F_UNLCK;
}

/* The kernel translates the holder of a record lock into the caller's pid namespace. */
static struct flock record(unsigned slot, int command)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
    if (fcntl(pids_file, command, &lock) != 0)
        lock.l_type = F_UNLCK;
    return lock;
}

uint32_t ledger_pid(unsigned slot)
{
    struct flock lock = record(slot, F_GETLK);
    return lock.l_type != F_UNLCK && lock.l_pid > 0 ? (uint32_t)lock.l_pid
                                                    : ledger->slots[slot].pid;
}

/* The byte is locked before its slot is marked as taken, so a slot with neither is free. */
static int claim(unsigned slot)
{
    short type = F_WRLCK;
    return lock_byte(F_OFD_SETLK, slot, &type) == 0;
}

static void take(unsigned slot)
{
    struct slot *mine = &ledger->slots[slot];
    mine->taken = 0;
    mine->initialised = 0;
    mine->not_found = 0;
    memset(mine->calls, 0, sizeof mine->calls);
    for (unsigned gpu = 0; gpu < MOST_GPUS; gpu++) {
        /* The queue's entries need no wiping, and would occupy memory. */
        struct use *use = &mine->gpus[gpu];
        memset(use, 0, offsetof(struct use, queue));
        if (mine->pid != 0)
            memset(use->samples, 0, sizeof use->samples);
    }
    mine->pid = (uint32_t)getpid();
    record(slot, F_SETLK);
    if (slot >= ledger->slots_used)
        ledger->slots_used = slot + 1;
    __atomic_store_n(&mine->taken, 1, __ATOMIC_RELEASE);
    ledger_own = mine;
}

/* The first slot that was never used. Otherwise that of a dead process, whose calls can no
 * longer be read. */
static void join(void)
{
    ledger_lock();
    for (unsigned pass = 0; pass < 2 && ledger_own == NULL; pass++)
        for (unsigned slot = 0; slot < MOST_SLOTS && ledger_own == NULL; slot++)
            if ((pass > 0 || ledger->slots[slot].pid == 0) && claim(slot))
                take(slot);
    ledger_unlock();
    if (ledger_own == NULL) {
        fprintf(stderr, "stand-in: more than %d processes\n", MOST_SLOTS);
        abort();
    }
}

/* The child shares the parent's open file, and with it the lock, until it closes its copy. */
static void after_fork(void)
{
    close(ledger_file);
    ledger_own = NULL;
    ledger_file = open(ledger_path, O_RDWR | O_CLOEXEC);
    if (ledger_file < 0)
        abort();
    join();
}

void ledger_join(void)
{
    join();
    pthread_atfork(NULL, NULL, after_fork);
}

void ledger_lock(void)
{
    int result = pthread_mutex_trylock(&ledger->mutex);
    if (result == EBUSY) {
        struct timespec latest;
        clock_gettime(CLOCK_REALTIME, &latest);
        latest.tv_sec += PATIENCE_S; /* only a stopped process holds it for so long */
        result = pthread_mutex_timedlock(&ledger->mutex, &latest);
    }
    if (result == EOWNERDEAD)
        result = pthread_mutex_consistent(&ledger->mutex);
    if (result != 0) {
        fprintf(stderr, "stand-in: %s: %s\n", ledger_path, strerror(result));
        abort();
    }
}

void ledger_unlock(void)
{
    pthread_mutex_unlock(&ledger->mutex);
}

void ledger_reap(void)
{
    for (unsigned slot = 0; slot < ledger->slots_used; slot++)
        if (ledger->slots[slot].taken && !ledger_alive(slot))
            ledger->slots[slot].taken = 0; /* its numbers stay readable until the slot is reused */
}

uint64_t ledger_held(const struct use *use)
{
    uint64_t sum = 0;
    for (int kind = 0; kind < HELD_KINDS; kind++)
        sum += use->bytes[kind];
    return sum;
}

uint64_t ledger_resident(unsigned gpu)
{
    uint64_t sum = 0;
    for (unsigned slot = 0; slot < ledger->slots_used; slot++)
        if (ledger->slots[slot].taken)
            sum += ledger_held(&ledger->slots[slot].gpus[gpu]);
    return sum;
}

/* Whether `bytes` more fit into the GPU. */
static int fits(unsigned gpu, uint64_t bytes)
{
    const struct node_gpu *card = &node_get()->gpus[gpu];
    uint64_t room = card->bytes - card->reserved_bytes, held = ledger_resident(gpu);
    return bytes <= room && held <= room - bytes;
}

int ledger_charge(unsigned gpu, enum kind kind, uint64_t bytes)
{
    struct use *use = &ledger_own->gpus[gpu];
    ledger_lock();
    int fit = fits(gpu, bytes);
    if (!fit) {
        ledger_reap();
        fit = fits(gpu, bytes);
    }
    if (fit) {
        use->bytes[kind] += bytes;
        uint64_t held = ledger_held(use), resident = ledger_resident(gpu);
        use->peak = held > use->peak ? held : use->peak;
        if (resident > ledger->engines[gpu].peak) {
            /* Without the memory of dead processes. */
            ledger_reap();
            resident = ledger_resident(gpu);
            if (resident > ledger->engines[gpu].peak)
                ledger->engines[gpu].peak = resident;
        }
    }
    ledger_unlock();
    return fit ? 0 : -1;
}

void ledger_credit(unsigned gpu, enum kind kind, uint64_t bytes)
{
    ledger_lock();
    if (ledger_own->gpus[gpu].bytes[kind] < bytes) {
        fprintf(stderr, "stand-in: more of kind %d is freed than held\n", kind);
        abort();
    }
    ledger_own->gpus[gpu].bytes[kind] -= bytes;
    ledger_unlock();
}

void ledger_free_and_total(unsigned gpu, uint64_t *free_bytes, uint64_t *total)
{
    const struct node_gpu *card = &node_get()->gpus[gpu];
    ledger_lock();
    ledger_reap();
    *total = card->bytes - card->reserved_bytes;
    uint64_t held = ledger_resident(gpu);
    *free_bytes = *total > held ? *total - held : 0;
    ledger_unlock();
}

uint64_t ledger_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
