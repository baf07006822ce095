/* Memory pools. A pool takes memory from the GPU in large pieces and keeps freed pieces. So the shim
   counts the memory that the driver reports as reserved. Before an allocation the shim counts the
   possible growth, and after it the actual growth, which counts once for several threads. */
#include "devices.h"
#include "group.h"
#include "hooks.h"
#include "process.h"

enum { SMALLEST_GRANULE = 2 << 20, USUAL_GRANULE = 32 << 20 }; /* a GPU's page; a pool's usual growth */

static uint64_t attribute(void *pool, int which)
{
    uint64_t bytes = 0;

    if (!driver.cuMemPoolGetAttribute ||
        driver.cuMemPoolGetAttribute(pool, which, &bytes) != CU_SUCCESS)
        return UINT64_MAX;
    return bytes;
}

static void know_pool(void *pool, enum place place)
{
    struct entry entry = {.key = (uintptr_t)pool, .kind = TABLE_POOL, .place = (uint8_t)place}, known;

    pthread_mutex_lock(&process->lock);
    if (!table_get(TABLE_POOL, entry.key, &known))
        table_put(&entry);
    pthread_mutex_unlock(&process->lock);
}

uint64_t granule(void)
{
    return process->pool_granule ? process->pool_granule : USUAL_GRANULE;
}

uint64_t round_up(uint64_t bytes, uint64_t granule)
{
    return bytes > UINT64_MAX - granule ? UINT64_MAX : (bytes + granule - 1) / granule * granule;
}

uint64_t counted_now(uint64_t counted, uint64_t growing, uint64_t reserved)
{
    if (reserved >= counted)
        return reserved;
    return reserved + growing < counted ? reserved + growing : counted;
}

/* Count what a pool reserves, after a call for which `grown` of pool->owner was counted. The caller has
   `lock`. False: it grew by more than all calls counted, and that does not fit. */
static bool settle(struct entry *pool, uint64_t grown)
{
    uint64_t counted = pool->bytes + pool->owner, growing = pool->owner - grown;
    uint64_t reserved = attribute((void *)(uintptr_t)pool->key, CU_POOL_RESERVED);

    if (pool->place != OURS)
        return true;
    if (reserved == UINT64_MAX)
        reserved = counted - growing; /* unknown */
    uint64_t *least = &process->pool_granule, step = reserved & -reserved;

    if (step && (*least == 0 || step < *least))
        *least = step < SMALLEST_GRANULE ? SMALLEST_GRANULE : step;
    bool within = true;
    uint64_t now = counted_now(counted, growing, reserved);

    if (now != counted)
        within = group_replace(counted, now) || now <= counted;
    pool->bytes = now - growing;
    pool->owner = growing;
    return within;
}

static bool settle_one(struct entry *pool, void *with)
{
    settle(pool, 0);
    return true;
}

static bool trim_one(struct entry *pool, void *with)
{
    if (driver.cuMemPoolTrimTo && pool->bytes > 0)
        driver.cuMemPoolTrimTo((void *)(uintptr_t)pool->key, 0);
    settle(pool, 0);
    return true;
}

void settle_pools(void)
{
    pthread_mutex_lock(&process->lock);
    table_visit(TABLE_POOL, settle_one, NULL);
    pthread_mutex_unlock(&process->lock);
}

void trim_pools(void)
{
    pthread_mutex_lock(&process->lock);
    table_visit(TABLE_POOL, trim_one, NULL);
    pthread_mutex_unlock(&process->lock);
}

/* A running allocation from a pool. */
struct growth {
    struct entry pool;
    uint64_t bytes; /* counted for the growth of the pool */
    bool locked;    /* this call has `lock` and counted nothing */
    bool within;
};

static bool begin(struct entry *pool, void *with)
{
    pool->owner += ((struct growth *)with)->bytes;
    return true;
}

static bool settle_growth(struct entry *pool, void *with)
{
    struct growth *growth = with;
    bool begun = growth->bytes <= pool->owner; /* else another pool had this handle */

    growth->within = settle(pool, begun ? growth->bytes : 0);
    return begun;
}

static bool has_free(const struct entry *pool, uint64_t bytes)
{
    void *handle = (void *)(uintptr_t)pool->key;
    uint64_t reserved = attribute(handle, CU_POOL_RESERVED), used = attribute(handle, CU_POOL_USED);

    return reserved != UINT64_MAX && used < reserved && reserved - used >= bytes;
}

/* False: the possible growth does not fit. If only the pool's free memory is enough, the lock is held
   until the driver is done. So no other thread trims the pool or finds the same memory. A thread
   that counted earlier may take this memory, because its own counted bytes make up for it. */
static bool begin_growth(struct growth *growth, uint64_t bytes)
{
    if (growth->pool.place != OURS)
        return false;
    growth->bytes = round_up(bytes, granule());
    bool counted = group_charge(growth->bytes);

    if (!counted) {
        pthread_mutex_lock(&process->lock);
        if (has_free(&growth->pool, bytes)) {
            growth->bytes = 0;
            growth->locked = true;
            return true;
        }
        pthread_mutex_unlock(&process->lock);
        counted = charge(OURS, growth->bytes); /* releases unused memory */
    }
    if (!counted)
        return false;
    pthread_mutex_lock(&process->lock);
    table_change(TABLE_POOL, growth->pool.key, begin, growth);
    pthread_mutex_unlock(&process->lock);
    return true;
}

/* After the driver's answer: count the actual growth. False: it does not fit. */
static bool finish_growth(struct growth *growth)
{
    if (!growth->locked)
        pthread_mutex_lock(&process->lock);
    growth->within = true;
    if (!table_change(TABLE_POOL, growth->pool.key, settle_growth, growth))
        group_release(growth->bytes); /* another thread destroyed the pool */
    pthread_mutex_unlock(&process->lock);
    return growth->within;
}

/* The entry of a pool. An unknown pool is taken to be on the current context's GPU. */
static bool find_pool(void *pool, struct entry *entry)
{
    enum place place;

    if (table_get(TABLE_POOL, (uintptr_t)pool, entry))
        return true;
    if (!pool || current_place(&place) != CU_SUCCESS)
        return false;
    know_pool(pool, place);
    return table_get(TABLE_POOL, (uintptr_t)pool, entry);
}

static int finish_alloc(int result, struct growth *growth, uint64_t pointer, uint64_t bytes,
                        void *stream)
{
    bool within = finish_growth(growth);

    if (result != CU_SUCCESS)
        return result;
    if (!within) {
        driver.cuMemFreeAsync(pointer, stream);
        trim_pools();
        group_denied();
        return CU_OUT_OF_MEMORY;
    }
    table_put(&(struct entry){.key = pointer, .bytes = bytes, .owner = growth->pool.key,
                              .kind = TABLE_POOLED});
    return CU_SUCCESS;
}

/* The pool of cuMemAllocAsync. */
static void *current_pool(void)
{
    void *pool = NULL;
    int device;

    if (driver.cuCtxGetDevice(&device) != CU_SUCCESS ||
        driver.cuDeviceGetMemPool(&pool, device) != CU_SUCCESS)
        return NULL;
    know_pool(pool, place_of_device(device));
    return pool;
}

static int call(const struct hook *hook, bool has_pool, PARAMS_alloc_pool)
{
    return has_pool ? REAL(hook, alloc_pool)(ARGS_alloc_pool)
                    : REAL(hook, alloc_async)(ARGS_alloc_async);
}

/* Allocate in a stream's order. A captured allocation counts when its graph is launched. */
static int allocate(const struct hook *hook, bool has_pool, PARAMS_alloc_pool)
{
    struct growth growth = {0};
    uint64_t allocated = 0;
    void *on = stream_of(hook, stream);

    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    if (is_capturing(on)) {
        int result = call(hook, has_pool, ARGS_alloc_pool);

        if (result == CU_SUCCESS)
            note_captured(on, bytes);
        return result;
    }
    if (!pointer || !find_pool(has_pool ? pool : current_pool(), &growth.pool) ||
        growth.pool.place == UNCOUNTED)
        return call(hook, has_pool, ARGS_alloc_pool);
    if (!begin_growth(&growth, bytes))
        return CU_OUT_OF_MEMORY;
    int result = call(hook, has_pool, &allocated, bytes, pool, stream);

    result = finish_alloc(result, &growth, allocated, bytes, on);
    if (result == CU_SUCCESS)
        *pointer = allocated;
    return result;
}

int on_alloc_async(const struct hook *hook, PARAMS_alloc_async)
{
    return allocate(hook, false, pointer, bytes, NULL, stream);
}

int on_alloc_pool(const struct hook *hook, PARAMS_alloc_pool)
{
    return allocate(hook, true, ARGS_alloc_pool);
}

NOTING(on_pool_create, pool_create, know_pool(*pool, place_of_location(&properties->location)))
NOTING(on_pool_of_device, pool_device, know_pool(*pool, place_of_device(device)))
NOTING(on_pool_of_location, pool_location, know_pool(*pool, place_of_location(location)))
NOTING(on_pool_import, pool_import, know_pool(*pool, UNCOUNTED))

/* An allocation that outlives its pool counts on its own. */
static bool leave_pool(struct entry *entry, void *with)
{
    struct entry *pool = with;

    if (entry->owner == pool->key) {
        entry->kind = TABLE_POINTER;
        entry->owner = 0;
        pool->owner += entry->bytes;
    }
    return true;
}

int on_pool_destroy(const struct hook *hook, PARAMS_handle)
{
    struct entry pool;

    if (!group_join())
        return REAL(hook, handle)(ARGS_handle);
    pthread_mutex_lock(&process->lock);
    bool known = table_take(TABLE_POOL, (uintptr_t)handle, &pool);
    int result = REAL(hook, handle)(ARGS_handle);

    if (known && result != CU_SUCCESS) {
        table_put(&pool);
    } else if (known) {
        pool.owner = 0;
        table_visit(TABLE_POOLED, leave_pool, &pool);
        group_replace(pool.bytes, pool.owner);
    }
    pthread_mutex_unlock(&process->lock);
    return result;
}

int on_pool_trim(const struct hook *hook, PARAMS_pool_trim)
{
    int result = REAL(hook, pool_trim)(ARGS_pool_trim);
    struct growth growth = {0};

    if (result == CU_SUCCESS && group_join() && table_get(TABLE_POOL, (uintptr_t)pool, &growth.pool))
        finish_growth(&growth);
    return result;
}
