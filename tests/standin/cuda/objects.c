#define _GNU_SOURCE
#include "objects.h"

#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

struct vacant {
    uint64_t start, bytes;
    struct vacant *next;
};

enum { BUCKETS = 1024 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *by_start; /* tree of tsearch(3), with ranges that do not overlap */
static struct object *newest;
static struct vacant *vacant[BUCKETS];
static uint64_t space, space_end, space_32, space_32_end;

void objects_lock(void)
{
    pthread_mutex_lock(&mutex);
}

void objects_unlock(int *held)
{
    (void)held;
    pthread_mutex_unlock(&mutex);
}

void misuse(const char *what, uint64_t handle)
{
    fprintf(stderr, "stand-in: %s: %#llx\n", what, (unsigned long long)handle);
    abort();
}

static int compare(const void *left, const void *right)
{
    const struct object *a = left, *b = right;
    if (a->start + a->length <= b->start)
        return -1;
    return b->start + b->length <= a->start;
}

void *object_new(size_t size, enum type type, unsigned gpu, uint64_t start, uint64_t length,
                 struct object *context)
{
    struct object *fresh = calloc(1, size);
    if (fresh == NULL)
        abort();
    *fresh = (struct object){.type = type, .gpu = gpu, .start = start, .length = length};
    if (start == 0)
        *fresh = (struct object){.type = type, .gpu = gpu, .start = (uintptr_t)fresh, .length = 1};
    fresh->context = context;
    fresh->older = newest;
    if (newest != NULL)
        newest->newer = fresh;
    newest = fresh;
    struct object **placed = tsearch(fresh, &by_start, compare);
    if (placed == NULL || *placed != fresh)
        misuse("two objects at one address", fresh->start);
    return fresh;
}

static struct object *find(uint64_t address)
{
    struct object key = {.start = address, .length = 1};
    struct object **found = tfind(&key, &by_start, compare);
    return found != NULL ? *found : NULL;
}

void *object_at(uint64_t address, enum type type)
{
    struct object *found = find(address);
    if (found == NULL || found->type != type)
        return NULL;
    if (found->destroyed)
        misuse(type == ALLOCATION ? "use of freed memory" : "use of a destroyed handle", address);
    return found;
}

void *object_of(CUhandle handle, enum type type)
{
    struct object *found = object_at((uintptr_t)handle, type);
    return found != NULL && found->start == (uintptr_t)handle ? found : NULL;
}

void object_destroy(struct object *object)
{
    if (object->destroyed)
        misuse("something is destroyed twice", object->start);
    object->destroyed = 1;
    if (object->older != NULL)
        object->older->newer = object->newer;
    if (object->newer != NULL)
        object->newer->older = object->older;
    if (newest == object)
        newest = object->older;
    if (object->start != (uintptr_t)object && node_get()->reuse_addresses) {
        tdelete(object, &by_start, compare);
        address_give_back(object->start, object->length);
        if (object->type == ALLOCATION)
            free(object); /* no other reference exists, and there may be millions */
    }
}

struct object *objects_newest(void)
{
    return newest;
}

/* Address space that the kernel gives to no other user: the CPU's access to a device address
 * faults. */
static uint64_t reserve(uint64_t wanted, uint64_t bytes, int flags)
{
    void *start = mmap((void *)(uintptr_t)wanted, bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    return start == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)start;
}

static uint64_t reuse(uint64_t bytes, uint64_t alignment)
{
    for (struct vacant **place = &vacant[bytes / 512 % BUCKETS]; *place; place = &(*place)->next) {
        struct vacant *found = *place;
        if (found->bytes != bytes || found->start % alignment != 0)
            continue;
        uint64_t start = found->start;
        *place = found->next;
        free(found);
        return start;
    }
    return 0;
}

uint64_t address_take(uint64_t bytes, uint64_t alignment)
{
    uint64_t found = reuse(bytes, alignment);
    for (uint64_t room = 1ull << 45; space == 0 && room >= 1ull << 32; room /= 2) {
        space = reserve(0, room, 0);
        space_end = space + room;
    }
    if (found != 0)
        return found;
    uint64_t start = (space + alignment - 1) / alignment * alignment;
    if (space == 0 || bytes > space_end - start)
        misuse("no device addresses are left: set reuse_addresses", bytes);
    space = start + bytes;
    return start;
}

uint64_t address_take_32(uint32_t bytes)
{
    const uint64_t room = 1u << 29;
    uint64_t found = 0;
    /* Above the addresses of programs and MAP_32BIT; another copy of the library may have the
     * first range. */
    for (uint64_t start = 4 * room; space_32 == 0 && start < 1ull << 32; start += room) {
        space_32 = reserve(start, room, MAP_FIXED_NOREPLACE);
        space_32_end = space_32 + room;
    }
    if (space_32 != 0 && bytes <= space_32_end - space_32) {
        found = space_32;
        space_32 += bytes;
    }
    return found;
}

void address_give_back(uint64_t start, uint64_t bytes)
{
    struct vacant *one = malloc(sizeof *one);
    if (one == NULL)
        abort();
    struct vacant **place = &vacant[bytes / 512 % BUCKETS];
    *one = (struct vacant){start, bytes, *place};
    *place = one;
}
