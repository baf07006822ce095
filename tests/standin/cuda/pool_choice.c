/* The pool from which a device's cuMemAllocAsync allocates. */
#include "pools.h"

static CUresult pool_for(CUhandle *pool, CUdevice device)
{
    GPU_OF(device);
    if (pool == NULL)
        return INVALID_VALUE;
    LOCKED;
    *pool = pool_default(gpu);
    return SUCCESS;
}

static CUresult pool_at(CUhandle *pool, const struct location *location)
{
    if (location == NULL || location->type != LOCATION_DEVICE)
        return INVALID_VALUE;
    return pool_for(pool, location->id);
}

PUBLIC CUresult cuDeviceGetDefaultMemPool(CUhandle *pool, CUdevice device)
{
    ENTER(cuDeviceGetDefaultMemPool);
    return pool_for(pool, device);
}

PUBLIC CUresult cuDeviceGetMemPool(CUhandle *pool, CUdevice device)
{
    ENTER(cuDeviceGetMemPool);
    return pool_for(pool, device);
}

PUBLIC CUresult cuMemGetDefaultMemPool(CUhandle *pool, const struct location *location, int type)
{
    ENTER(cuMemGetDefaultMemPool);
    (void)type;
    return pool_at(pool, location);
}

PUBLIC CUresult cuMemGetMemPool(CUhandle *pool, const struct location *location, int type)
{
    ENTER(cuMemGetMemPool);
    (void)type;
    return pool_at(pool, location);
}
