/* Physical memory by handle. The memory is free after as many releases as creations, retains and
   imports, when no address maps it any more. */
#include <stdlib.h>

#include "devices.h"
#include "group.h"
#include "hooks.h"

int on_create(const struct hook *hook, PARAMS_create)
{
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    enum place place = properties ? place_of_location(&properties->location) : UNCOUNTED;

    if (!handle || place == UNCOUNTED)
        return REAL(hook, create)(ARGS_create);
    if (!charge(place, bytes))
        return CU_OUT_OF_MEMORY;
    int result = REAL(hook, create)(ARGS_create);

    if (result == CU_SUCCESS)
        table_put(&(struct entry){.kind = TABLE_HANDLE, .key = *handle, .bytes = bytes,
                                  .references = 1});
    else
        group_release(bytes);
    return result;
}

/* A change of a handle's entry, and the entry after it. */
struct change {
    int references;
    int mappings;
    struct entry entry;
    bool gone;
};

static bool apply(struct entry *entry, void *with)
{
    struct change *change = with;

    entry->references += (uint32_t)change->references;
    entry->owner += (uint64_t)(int64_t)change->mappings;
    change->entry = *entry;
    change->gone = entry->references == 0 && entry->owner == 0;
    if (change->gone)
        entry->kind = TABLE_NONE;
    return true;
}

static bool change_handle(uint64_t handle, struct change *change)
{
    return table_change(TABLE_HANDLE, handle, apply, change);
}

/* Revert a change that the driver refused. */
static void undo(uint64_t handle, const struct change *done)
{
    struct change back = {.references = -done->references, .mappings = -done->mappings};

    if (done->gone) {
        struct entry entry = done->entry;

        entry.references += (uint32_t)back.references;
        entry.owner += (uint64_t)(int64_t)back.mappings;
        table_put(&entry);
    } else {
        change_handle(handle, &back);
    }
}

int on_release(const struct hook *hook, PARAMS_release)
{
    struct change change = {.references = -1};
    bool known = group_join() && change_handle(handle, &change);
    int result = REAL(hook, release)(ARGS_release);

    if (known && result != CU_SUCCESS)
        undo(handle, &change);
    else if (known && change.gone)
        group_release(change.entry.bytes);
    return result;
}

static void note_retain(uint64_t handle)
{
    change_handle(handle, &(struct change){.references = 1});
}

/* An import of this process' own memory is the same handle; memory of another process has no bytes. */
static void note_import(uint64_t handle)
{
    if (!change_handle(handle, &(struct change){.references = 1}))
        table_put(&(struct entry){.kind = TABLE_HANDLE, .key = handle, .references = 1});
}

NOTING(on_retain, retain, note_retain(*handle))
NOTING(on_import, import, note_import(*handle))

int on_map(const struct hook *hook, PARAMS_map)
{
    struct change change = {.mappings = 1};
    /* Before the call: another thread may release the handle right after the mapping. */
    bool known = group_join() && change_handle(handle, &change);
    int result = REAL(hook, map)(ARGS_map);

    if (known && result != CU_SUCCESS)
        undo(handle, &change);
    else if (known)
        table_put(&(struct entry){.kind = TABLE_MAPPING, .key = pointer, .bytes = bytes,
                                  .owner = handle});
    return result;
}

struct unmapping {
    struct entry mapping;
    struct change change;
    bool known;
};

/* The number of known, adjacent mappings in a range of addresses. */
static size_t count_mappings(uint64_t pointer, size_t bytes)
{
    struct entry mapping;
    size_t count = 0;

    for (uint64_t at = pointer; at - pointer < bytes; at += mapping.bytes, count++)
        if (!table_get(TABLE_MAPPING, at, &mapping) || mapping.bytes == 0)
            break;
    return count;
}

static void begin_unmap(struct unmapping *unmapping, size_t count, uint64_t at)
{
    for (; count > 0; count--, unmapping++) {
        unmapping->change.mappings = -1;
        if (!table_take(TABLE_MAPPING, at, &unmapping->mapping))
            return; /* by two threads at once: one of their calls fails */
        unmapping->known = change_handle(unmapping->mapping.owner, &unmapping->change);
        at += unmapping->mapping.bytes;
    }
}

static void finish_unmap(struct unmapping *unmapping, size_t count, int result)
{
    for (; count > 0; count--, unmapping++) {
        if (result != CU_SUCCESS && unmapping->mapping.bytes > 0)
            table_put(&unmapping->mapping);
        if (result != CU_SUCCESS && unmapping->known)
            undo(unmapping->mapping.owner, &unmapping->change);
        else if (unmapping->known && unmapping->change.gone)
            group_release(unmapping->change.entry.bytes);
    }
}

int on_unmap(const struct hook *hook, PARAMS_unmap)
{
    if (!group_join())
        return REAL(hook, unmap)(ARGS_unmap);
    size_t count = count_mappings(pointer, bytes);
    struct unmapping *unmappings = count > 0 ? calloc(count, sizeof *unmappings) : NULL;

    if (count > 0 && !unmappings)
        return CU_OUT_OF_MEMORY;
    /* Before the call: after it, another thread may have the handle and the address. */
    begin_unmap(unmappings, count, pointer);
    int result = REAL(hook, unmap)(ARGS_unmap);

    finish_unmap(unmappings, count, result);
    free(unmappings);
    return result;
}
