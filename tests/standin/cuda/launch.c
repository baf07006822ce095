/* Everything that starts a kernel. */
#include "capture.h"
#include "modules.h"
#include "streams.h"

static int is_empty(const unsigned size[3])
{
    return size[0] == 0 || size[1] == 0 || size[2] == 0;
}

/* Start a function on a stream, or add it to the graph that captures the stream. */
static CUresult launch(CUhandle handle, const unsigned grid[3], const unsigned block[3],
                       CUhandle stream, int per_thread)
{
    struct stream_place place;
    const struct function *function;
    {
        LOCKED;
        TRY(stream_of(stream, per_thread, &place));
        function = object_of(handle, FUNCTION);
        if (function == NULL)
            return INVALID_HANDLE;
        if (is_empty(grid) || is_empty(block))
            return INVALID_VALUE;
        TRY(module_load_on(function->module, place.gpu));
        int captured;
        TRY(capture_kernel(&place, function, &captured));
        if (captured)
            return SUCCESS;
    }
    __atomic_add_fetch(&ledger_own->gpus[place.gpu].launches, 1, __ATOMIC_RELAXED);
    stream_push(&place, function->ns);
    return SUCCESS;
}

#define GRID (const unsigned[3]){grid_x, grid_y, grid_z}
#define BLOCK (const unsigned[3]){block_x, block_y, block_z}

PUBLIC CUresult cuLaunchKernel(CUhandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                               CUhandle stream, void **parameters, void **extra)
{
    ENTER(cuLaunchKernel);
    (void)shared, (void)parameters, (void)extra;
    return launch(function, GRID, BLOCK, stream, 0);
}

PUBLIC CUresult cuLaunchKernel_ptsz(CUhandle function, unsigned grid_x, unsigned grid_y,
                                    unsigned grid_z, unsigned block_x, unsigned block_y,
                                    unsigned block_z, unsigned shared, CUhandle stream,
                                    void **parameters, void **extra)
{
    ENTER(cuLaunchKernel_ptsz);
    (void)shared, (void)parameters, (void)extra;
    return launch(function, GRID, BLOCK, stream, 1);
}

PUBLIC CUresult cuLaunchKernelEx(const struct launch_config *config, CUhandle function,
                                 void **parameters, void **extra)
{
    ENTER(cuLaunchKernelEx);
    if (config == NULL)
        return INVALID_VALUE;
    if (node_get()->reenter)
        return cuLaunchKernel(function, config->grid[0], config->grid[1], config->grid[2],
                              config->block[0], config->block[1], config->block[2],
                              config->shared_bytes, config->stream, parameters, extra);
    return launch(function, config->grid, config->block, config->stream, 0);
}

PUBLIC CUresult cuLaunchKernelEx_ptsz(const struct launch_config *config, CUhandle function,
                                      void **parameters, void **extra)
{
    ENTER(cuLaunchKernelEx_ptsz);
    (void)parameters, (void)extra;
    return config == NULL ? INVALID_VALUE
                          : launch(function, config->grid, config->block, config->stream, 1);
}

PUBLIC CUresult cuLaunchCooperativeKernel(CUhandle function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned shared, CUhandle stream,
                                          void **parameters)
{
    ENTER(cuLaunchCooperativeKernel);
    (void)shared, (void)parameters;
    return launch(function, GRID, BLOCK, stream, 0);
}

PUBLIC CUresult cuLaunchCooperativeKernel_ptsz(CUhandle function, unsigned grid_x, unsigned grid_y,
                                               unsigned grid_z, unsigned block_x, unsigned block_y,
                                               unsigned block_z, unsigned shared, CUhandle stream,
                                               void **parameters)
{
    ENTER(cuLaunchCooperativeKernel_ptsz);
    (void)shared, (void)parameters;
    return launch(function, GRID, BLOCK, stream, 1);
}

/* Each launch runs on the GPU of its stream, which must not be a default stream. */
PUBLIC CUresult cuLaunchCooperativeKernelMultiDevice(struct launch_parameters *list, unsigned count,
                                                     unsigned flags)
{
    ENTER(cuLaunchCooperativeKernelMultiDevice);
    if (list == NULL || count == 0 || flags > 3)
        return INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (list[i].stream == NULL || list[i].stream == STREAM_LEGACY ||
            list[i].stream == STREAM_PER_THREAD)
            return INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        TRY(launch(list[i].function, list[i].grid, list[i].block, list[i].stream, 0));
    return SUCCESS;
}

/* The launches of CUDA before 4.0 take the block's shape from the function. */
static CUresult launch_old(CUhandle handle, int width, int height, CUhandle stream)
{
    unsigned block[3];
    {
        LOCKED;
        const struct function *function = object_of(handle, FUNCTION);
        if (function == NULL)
            return INVALID_HANDLE;
        for (int i = 0; i < 3; i++)
            block[i] = function->block[i];
    }
    if (width < 1 || height < 1)
        return INVALID_VALUE;
    return launch(handle, (const unsigned[3]){(unsigned)width, (unsigned)height, 1}, block, stream, 0);
}

PUBLIC CUresult cuLaunch(CUhandle function)
{
    ENTER(cuLaunch);
    return launch_old(function, 1, 1, NULL);
}

PUBLIC CUresult cuLaunchGrid(CUhandle function, int width, int height)
{
    ENTER(cuLaunchGrid);
    return launch_old(function, width, height, NULL);
}

PUBLIC CUresult cuLaunchGridAsync(CUhandle function, int width, int height, CUhandle stream)
{
    ENTER(cuLaunchGridAsync);
    return launch_old(function, width, height, stream);
}
