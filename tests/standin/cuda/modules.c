#include "modules.h"

#include <stdlib.h>
#include <string.h>

CUresult module_load_on(struct module *module, unsigned gpu)
{
    if (module->loaded & 1u << gpu)
        return SUCCESS;
    if (ledger_charge(gpu, HELD_MODULE, node_get()->gpus[gpu].module_bytes) != 0)
        return OUT_OF_MEMORY;
    module->loaded |= 1u << gpu;
    return SUCCESS;
}

void module_release(struct module *module)
{
    for (unsigned gpu = 0; gpu < MOST_GPUS; gpu++)
        if (module->loaded & 1u << gpu)
            ledger_credit(gpu, HELD_MODULE, node_get()->gpus[gpu].module_bytes);
    module->loaded = 0;
    for (struct object *one = objects_newest(), *older; one != NULL; one = older) {
        older = one->older;
        if (one->type == FUNCTION && ((struct function *)one)->module == module)
            object_destroy(one);
    }
    object_destroy(&module->object);
}

static CUresult load(CUhandle *handle, const void *image)
{
    struct object *context;
    LOCKED;
    TRY(current_context(&context));
    if (handle == NULL || image == NULL)
        return INVALID_VALUE;
    struct module *made = object_new(sizeof *made, MODULE, context->gpu, 0, 0, context);
    CUresult result = module_load_on(made, context->gpu);
    if (result != SUCCESS)
        object_destroy(&made->object);
    else
        *handle = &made->object;
    return result;
}

PUBLIC CUresult cuModuleLoad(CUhandle *module, const char *path)
{
    ENTER(cuModuleLoad);
    return load(module, path);
}

PUBLIC CUresult cuModuleLoadData(CUhandle *module, const void *image)
{
    ENTER(cuModuleLoadData);
    return load(module, image);
}

PUBLIC CUresult cuModuleLoadDataEx(CUhandle *module, const void *image, unsigned count, int *options,
                                   void **values)
{
    ENTER(cuModuleLoadDataEx);
    (void)count, (void)options, (void)values;
    return load(module, image);
}

PUBLIC CUresult cuModuleLoadFatBinary(CUhandle *module, const void *image)
{
    ENTER(cuModuleLoadFatBinary);
    return load(module, image);
}

static CUresult unload(CUhandle handle)
{
    LOCKED;
    struct module *module = object_of(handle, MODULE);
    if (module == NULL)
        return INVALID_HANDLE;
    module_release(module);
    return SUCCESS;
}

PUBLIC CUresult cuModuleUnload(CUhandle module)
{
    ENTER(cuModuleUnload);
    return unload(module);
}

/* The time in a name like `matmul_250us`. */
static uint64_t duration(const char *name)
{
    static const struct {
        const char *unit;
        uint64_t ns;
    } units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}};
    const char *number = strrchr(name, '_');
    char *unit;
    if (number == NULL)
        return 0;
    uint64_t count = strtoull(number + 1, &unit, 10);
    for (unsigned i = 0; unit != number + 1 && i < sizeof units / sizeof *units; i++)
        if (strcmp(unit, units[i].unit) == 0)
            return count * units[i].ns;
    return 0;
}

static CUresult get_function(CUhandle *function, CUhandle handle, const char *name)
{
    LOCKED;
    struct module *module = object_of(handle, MODULE);
    if (module == NULL)
        return INVALID_HANDLE;
    if (function == NULL || name == NULL || *name == 0)
        return INVALID_VALUE;
    for (struct object *one = objects_newest(); one != NULL; one = one->older) {
        struct function *found = (struct function *)one;
        if (one->type == FUNCTION && found->module == module && strcmp(found->name, name) == 0) {
            *function = one;
            return SUCCESS;
        }
    }
    struct function *made =
        object_new(sizeof *made, FUNCTION, module->object.gpu, 0, 0, module->object.context);
    made->module = module;
    made->name = strdup(name);
    made->ns = duration(name);
    *function = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuModuleGetFunction(CUhandle *function, CUhandle module, const char *name)
{
    ENTER(cuModuleGetFunction);
    return get_function(function, module, name);
}

/* Of a library, nothing lies on a GPU until a function of it is used there. */
static CUresult load_library(CUhandle *library, const void *image)
{
    LOCKED;
    if (library == NULL || image == NULL)
        return INVALID_VALUE;
    struct module *made = object_new(sizeof *made, MODULE, 0, 0, 0, NULL);
    *library = &made->object;
    return SUCCESS;
}

PUBLIC CUresult cuLibraryLoadData(CUhandle *library, const void *image, int *jit, void **jit_values,
                                  unsigned jits, int *options, void **values, unsigned count)
{
    ENTER(cuLibraryLoadData);
    (void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
    return load_library(library, image);
}

PUBLIC CUresult cuLibraryLoadFromFile(CUhandle *library, const char *path, int *jit, void **jit_values,
                                      unsigned jits, int *options, void **values, unsigned count)
{
    ENTER(cuLibraryLoadFromFile);
    (void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
    return load_library(library, path);
}

PUBLIC CUresult cuLibraryUnload(CUhandle library)
{
    ENTER(cuLibraryUnload);
    return unload(library);
}

PUBLIC CUresult cuLibraryGetKernel(CUhandle *kernel, CUhandle library, const char *name)
{
    ENTER(cuLibraryGetKernel);
    return get_function(kernel, library, name);
}

/* A kernel's handle is its function's in every context. */
PUBLIC CUresult cuKernelGetFunction(CUhandle *function, CUhandle kernel)
{
    struct object *context;
    ENTER(cuKernelGetFunction);
    LOCKED;
    TRY(current_context(&context));
    struct function *found = object_of(kernel, FUNCTION);
    if (found == NULL)
        return INVALID_HANDLE;
    TRY(module_load_on(found->module, context->gpu));
    *function = kernel;
    return SUCCESS;
}

static CUresult name_of(const char **name, CUhandle handle)
{
    LOCKED;
    const struct function *function = object_of(handle, FUNCTION);
    if (function == NULL)
        return INVALID_HANDLE;
    *name = function->name;
    return SUCCESS;
}

PUBLIC CUresult cuKernelGetName(const char **name, CUhandle kernel)
{
    ENTER(cuKernelGetName);
    return name_of(name, kernel);
}

PUBLIC CUresult cuFuncGetName(const char **name, CUhandle function)
{
    ENTER(cuFuncGetName);
    return name_of(name, function);
}

/* What cuLaunch and cuLaunchGrid take in place of arguments. */
PUBLIC CUresult cuFuncSetBlockShape(CUhandle handle, int x, int y, int z)
{
    ENTER(cuFuncSetBlockShape);
    LOCKED;
    struct function *function = object_of(handle, FUNCTION);
    if (function == NULL)
        return INVALID_HANDLE;
    if (x < 1 || y < 1 || z < 1)
        return INVALID_VALUE;
    function->block[0] = (unsigned)x;
    function->block[1] = (unsigned)y;
    function->block[2] = (unsigned)z;
    return SUCCESS;
}

PUBLIC CUresult cuFuncSetSharedSize(CUhandle handle, unsigned bytes)
{
    ENTER(cuFuncSetSharedSize);
    LOCKED;
    (void)bytes;
    return object_of(handle, FUNCTION) == NULL ? INVALID_HANDLE : SUCCESS;
}
