#define _GNU_SOURCE
#include "pools.h"

#include "capture.h"
#include "streams.h"

#include <sys/mman.h>
#include <unistd.h>

enum { BLOCK = 512, SMALLEST_CHUNK = 2 << 20, PINNED = 1, FILE_DESCRIPTOR = 1, FIRST_FLAG = 1,
       LAST_FLAG = 3, THRESHOLD = 4, RESERVED = 5, RESERVED_PEAK = 6, USED = 7, USED_PEAK = 8 };

struct pool {
    struct object object;
    struct reserve reserve;
    int on_host;
    int of_another; /* another process owns it: it gives no new memory here */
    int ending; /* destroyed once its last memory is freed */
    uint64_t most, threshold;
    int flags[LAST_FLAG + 1];
};

static struct pool *defaults[MOST_GPUS];

static uint64_t up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

int reserve_use(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t bytes, uint64_t most)
{
    uint64_t used = reserve->used + bytes;
    if (most != 0 && used > most)
        return -1;
    if (used > reserve->reserved) {
        /* A whole chunk if it fits, otherwise the rest. */
        const uint64_t units[] = {node_get()->pool_chunk, SMALLEST_CHUNK, BLOCK};
        uint64_t more = 0;
        for (unsigned i = 0; i < sizeof units / sizeof *units && more == 0; i++) {
            uint64_t wanted = up(used, units[i]);
            if (most != 0 && wanted > most)
                wanted = up(used, BLOCK);
            if (ledger_charge(gpu, kind, wanted - reserve->reserved) == 0)
                more = wanted - reserve->reserved;
        }
        if (more == 0)
            return -1;
        reserve->reserved += more;
    }
    reserve->used = used;
    if (reserve->used > reserve->used_peak)
        reserve->used_peak = reserve->used;
    if (reserve->reserved > reserve->reserved_peak)
        reserve->reserved_peak = reserve->reserved;
    return 0;
}

void reserve_trim(struct reserve *reserve, unsigned gpu, enum kind kind, uint64_t keep)
{
    uint64_t least = up(reserve->used, node_get()->pool_chunk);
    if (keep > least)
        least = keep;
    if (reserve->reserved <= least)
        return;
    ledger_credit(gpu, kind, reserve->reserved - least);
    reserve->reserved = least;
}

static struct pool *pool_new(unsigned gpu)
{
    return object_new(sizeof(struct pool), POOL, gpu, 0, 0, NULL);
}

struct object *pool_default(unsigned gpu)
{
    if (defaults[gpu] == NULL)
        defaults[gpu] = pool_new(gpu);
    return &defaults[gpu]->object;
}

static void end_if_empty(struct pool *pool)
{
    if (!pool->ending || pool->reserve.used > 0)
        return;
    reserve_trim(&pool->reserve, pool->object.gpu, HELD_POOL, 0);
    object_destroy(&pool->object);
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUhandle wanted, CUhandle stream,
                         int per_thread)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(stream, per_thread, &place));
    struct pool *pool = object_of(wanted != NULL ? wanted : pool_default(place.gpu), POOL);
    if (pool == NULL || pool->ending || pool->of_another || pointer == NULL || bytes == 0)
        return INVALID_VALUE;
    if (bytes > 1ull << 60)
        return OUT_OF_MEMORY;
    int captured;
    TRY(capture_alloc(&place, pool->object.gpu, bytes, pointer, &captured));
    if (captured)
        return SUCCESS;
    uint64_t length = up(bytes, BLOCK);
    if (!pool->on_host &&
        reserve_use(&pool->reserve, pool->object.gpu, HELD_POOL, length, pool->most) != 0)
        return OUT_OF_MEMORY;
    uint64_t start = address_take(length, BLOCK);
    struct allocation *made =
        object_new(sizeof *made, ALLOCATION, pool->object.gpu, start, length, NULL);
    made->asked = bytes;
    made->pool = pool;
    *pointer = start;
    return SUCCESS;
}

BOTH(cuMemAllocAsync, (CUdeviceptr *pointer, size_t bytes, CUhandle stream),
     allocate(pointer, bytes, NULL, stream, per_thread))
BOTH(cuMemAllocFromPoolAsync,
     (CUdeviceptr *pointer, size_t bytes, CUhandle pool, CUhandle stream),
     pool == NULL ? INVALID_VALUE : allocate(pointer, bytes, pool, stream, per_thread))

void pool_take_back(struct allocation *allocation)
{
    struct pool *pool = allocation->pool;
    if (!pool->on_host)
        pool->reserve.used -= allocation->object.length;
    object_destroy(&allocation->object);
    end_if_empty(pool);
}

static CUresult release(CUdeviceptr pointer, CUhandle stream, int per_thread)
{
    struct stream_place place;
    LOCKED;
    TRY(stream_of(stream, per_thread, &place));
    struct allocation *allocation = object_at(pointer, ALLOCATION);
    if (allocation == NULL || allocation->object.start != pointer)
        return INVALID_VALUE;
    int captured;
    TRY(capture_free(&place, allocation, &captured));
    return captured ? SUCCESS : allocation_release(allocation);
}

BOTH(cuMemFreeAsync, (CUdeviceptr pointer, CUhandle stream), release(pointer, stream, per_thread))

void pools_release_unused(unsigned gpu)
{
    for (struct object *one = objects_newest(); one != NULL; one = one->older)
        if (one->type == POOL && one->gpu == gpu) {
            struct pool *pool = (struct pool *)one;
            reserve_trim(&pool->reserve, gpu, HELD_POOL, pool->threshold);
        }
}

void pools_reset(unsigned gpu)
{
    for (struct object *one = objects_newest(), *older; one != NULL; one = older) {
        older = one->older;
        if (one->type == ALLOCATION && one->gpu == gpu && ((struct allocation *)one)->pool != NULL)
            pool_take_back((struct allocation *)one);
    }
    for (struct object *one = objects_newest(); one != NULL; one = one->older)
        if (one->type == POOL && one->gpu == gpu)
            reserve_trim(&((struct pool *)one)->reserve, gpu, HELD_POOL, 0);
}

PUBLIC CUresult cuMemPoolCreate(CUhandle *handle, const struct pool_properties *properties)
{
    ENTER(cuMemPoolCreate);
    if (handle == NULL || properties == NULL || properties->type != PINNED)
        return INVALID_VALUE;
    int device = properties->location.id;
    int on_host = properties->location.type != LOCATION_DEVICE &&
                  properties->location.type != LOCATION_DEVICE_LOCALITY_DOMAIN;
    if (properties->location.type == LOCATION_DEVICE_LOCALITY_DOMAIN)
        device &= 0xff;
    if (on_host && (properties->location.type < LOCATION_HOST ||
                    properties->location.type > LOCATION_HOST_NUMA_CURRENT))
        return INVALID_VALUE;
    int gpu = on_host ? 0 : gpu_of(device);
    if (gpu < 0)
        return INVALID_DEVICE;
    LOCKED;
    struct pool *made = pool_new((unsigned)gpu);
    made->on_host = on_host;
    made->most = properties->max_size;
    *handle = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolDestroy(CUhandle handle)
{
    ENTER(cuMemPoolDestroy);
    LOCKED;
    struct pool *pool = object_of(handle, POOL);
    if (pool == NULL || pool == defaults[pool->object.gpu])
        return INVALID_VALUE;
    pool->ending = 1;
    end_if_empty(pool);
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolExportToShareableHandle(void *shareable, CUhandle handle, int type,
                                                 unsigned long long flags)
{
    ENTER(cuMemPoolExportToShareableHandle);
    LOCKED;
    const struct pool *pool = object_of(handle, POOL);
    if (pool == NULL || shareable == NULL || type != FILE_DESCRIPTOR || flags != 0)
        return INVALID_VALUE;
    int file = memfd_create("pool", MFD_CLOEXEC);
    if (file < 0 || pwrite(file, &pool->object.gpu, sizeof pool->object.gpu, 0) < 0)
        return OUT_OF_MEMORY;
    *(int *)shareable = file;
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolImportFromShareableHandle(CUhandle *handle, void *shareable, int type,
                                                   unsigned long long flags)
{
    unsigned gpu;
    ENTER(cuMemPoolImportFromShareableHandle);
    LOCKED;
    if (handle == NULL || type != FILE_DESCRIPTOR || flags != 0 ||
        pread((int)(intptr_t)shareable, &gpu, sizeof gpu, 0) != sizeof gpu)
        return INVALID_VALUE;
    struct pool *made = pool_new(gpu);
    made->of_another = 1;
    *handle = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolTrimTo(CUhandle handle, size_t keep)
{
    ENTER(cuMemPoolTrimTo);
    LOCKED;
    struct pool *pool = object_of(handle, POOL);
    if (pool == NULL)
        return INVALID_VALUE;
    reserve_trim(&pool->reserve, pool->object.gpu, HELD_POOL, keep);
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolGetAttribute(CUhandle handle, int attribute, void *value)
{
    ENTER(cuMemPoolGetAttribute);
    LOCKED;
    const struct pool *pool = object_of(handle, POOL);
    if (pool == NULL || value == NULL)
        return INVALID_VALUE;
    uint64_t *number = value;
    switch (attribute) {
    case THRESHOLD: *number = pool->threshold; return SUCCESS;
    case RESERVED: *number = pool->reserve.reserved; return SUCCESS;
    case RESERVED_PEAK: *number = pool->reserve.reserved_peak; return SUCCESS;
    case USED: *number = pool->reserve.used; return SUCCESS;
    case USED_PEAK: *number = pool->reserve.used_peak; return SUCCESS;
    default: break;
    }
    if (attribute < FIRST_FLAG || attribute > LAST_FLAG)
        return INVALID_VALUE;
    *(int *)value = pool->flags[attribute];
    return SUCCESS;
}

PUBLIC CUresult cuMemPoolSetAttribute(CUhandle handle, int attribute, void *value)
{
    ENTER(cuMemPoolSetAttribute);
    LOCKED;
    struct pool *pool = object_of(handle, POOL);
    if (pool == NULL || value == NULL)
        return INVALID_VALUE;
    if (attribute >= FIRST_FLAG && attribute <= LAST_FLAG)
        pool->flags[attribute] = *(const int *)value;
    else if (attribute == THRESHOLD)
        pool->threshold = *(const uint64_t *)value;
    else if (attribute == RESERVED_PEAK && *(const uint64_t *)value == 0)
        pool->reserve.reserved_peak = pool->reserve.reserved;
    else if (attribute == USED_PEAK && *(const uint64_t *)value == 0)
        pool->reserve.used_peak = pool->reserve.used;
    else
        return INVALID_VALUE;
    return SUCCESS;
}
