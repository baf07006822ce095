/* Which pool a device's cuMemAllocAsync takes from. */
#include "pools.h"

static CUresult pool_for(CUhandle *pool, CUdevice device, struct object *(*which)(unsigned))
{
    GPU_OF(device);
    if (pool == NULL)
        return INVALID_VALUE;
    LOCKED;
    *pool = which(gpu);
    return SUCCESS;
}

static CUresult pool_at(CUhandle *pool, const struct location *location,
                        struct object *(*which)(unsigned))
{
    if (location == NULL || location->type != LOCATION_DEVICE)
        return INVALID_VALUE;
    return pool_for(pool, location->id, which);
}

PUBLIC CUresult cuDeviceGetDefaultMemPool(CUhandle *pool, CUdevice device)
{
    ENTER(cuDeviceGetDefaultMemPool);
    return pool_for(pool, device, pool_default);
}

PUBLIC CUresult cuDeviceGetMemPool(CUhandle *pool, CUdevice device)
{
    ENTER(cuDeviceGetMemPool);
    return pool_for(pool, device, pool_chosen);
}

PUBLIC CUresult cuMemGetDefaultMemPool(CUhandle *pool, const struct location *location, int type)
{
    ENTER(cuMemGetDefaultMemPool);
    (void)type;
    return pool_at(pool, location, pool_default);
}

PUBLIC CUresult cuMemGetMemPool(CUhandle *pool, const struct location *location, int type)
{
    ENTER(cuMemGetMemPool);
    (void)type;
    return pool_at(pool, location, pool_chosen);
}

static CUresult choose(CUdevice device, CUhandle handle)
{
    GPU_OF(device);
    LOCKED;
    struct object *pool = object_of(handle, POOL);
    if (pool == NULL || pool->gpu != gpu)
        return INVALID_VALUE;
    pool_choose(pool);
    return SUCCESS;
}

PUBLIC CUresult cuDeviceSetMemPool(CUdevice device, CUhandle pool)
{
    ENTER(cuDeviceSetMemPool);
    return choose(device, pool);
}

PUBLIC CUresult cuMemSetMemPool(const struct location *location, int type, CUhandle pool)
{
    ENTER(cuMemSetMemPool);
    (void)type;
    return location == NULL || location->type != LOCATION_DEVICE ? INVALID_VALUE
                                                                  : choose(location->id, pool);
}
