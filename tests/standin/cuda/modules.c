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

PUBLIC CUresult cuModuleLoadData(CUhandle *module, const void *image)
{
    ENTER(cuModuleLoadData);
    return load(module, image);
}

/* The duration in a name such as `matmul_250us`. */
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
