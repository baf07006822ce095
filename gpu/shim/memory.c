/* Plain allocations of device memory, memory of other processes, and how much there is. */
#include "devices.h"
#include "group.h"
#include "hooks.h"

enum { PITCH_ALIGNMENT = 512 }; /* the largest pitch alignment of NVIDIA's GPUs */
enum { BLOCK = 512, PAGE = 4096 }; /* what device memory and managed memory come in, at least */

/* ---- allocations ---------------------------------------------------------------------------- */

/* After the driver's answer: remember what was allocated, or count it no more. */
static int finish(int result, struct entry *entry, uint64_t key)
{
    entry->key = key;
    if (result == CU_SUCCESS)
        table_put(entry); /* without memory for that it stays counted */
    else
        group_release(entry->bytes);
    return result;
}

static int begin(struct entry *entry, uint64_t bytes, uint64_t block)
{
    uint64_t rounded = bytes > UINT64_MAX - block ? UINT64_MAX : (bytes + block - 1) / block * block;

    *entry = (struct entry){.kind = TABLE_POINTER, .bytes = rounded};
    int result = current_owner(entry);

    if (result != CU_SUCCESS)
        return result;
    return charge(entry->place, rounded) ? CU_SUCCESS : CU_OUT_OF_MEMORY;
}

int on_alloc(const struct hook *hook, PARAMS_alloc)
{
    struct entry entry;
    int result = begin(&entry, bytes, BLOCK);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, alloc)(ARGS_alloc);
    return finish(result, &entry, result == CU_SUCCESS ? *pointer : 0);
}

int on_managed(const struct hook *hook, PARAMS_managed)
{
    struct entry entry;
    int result = begin(&entry, bytes, PAGE);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, managed)(ARGS_managed);
    return finish(result, &entry, result == CU_SUCCESS ? *pointer : 0);
}

/* The bytes of rows that the driver will make longer: not less than it will take. */
static uint64_t bytes_of_rows(uint64_t width, uint64_t height)
{
    unsigned __int128 bytes = (unsigned __int128)width + PITCH_ALIGNMENT - 1;

    bytes = bytes / PITCH_ALIGNMENT * PITCH_ALIGNMENT * height;
    return bytes > UINT64_MAX ? UINT64_MAX : (uint64_t)bytes;
}

/* After an allocation of rows: count what the driver made of them. False: it is too much. */
static bool count_rows(struct entry *entry, uint64_t pitch, uint64_t height)
{
    uint64_t bytes = pitch * height;

    if (bytes <= entry->bytes)
        group_release(entry->bytes - bytes);
    else if (!charge(entry->place, bytes - entry->bytes))
        return false;
    entry->bytes = bytes;
    return true;
}

int on_pitch(const struct hook *hook, PARAMS_pitch)
{
    struct entry entry;
    uint64_t allocated = 0;
    size_t row = 0;
    int result = begin(&entry, bytes_of_rows(width, height), BLOCK);

    if (result != CU_SUCCESS)
        return result;
    if (!pointer || !pitch)
        return finish(REAL(hook, pitch)(ARGS_pitch), &entry, 0);
    result = REAL(hook, pitch)(&allocated, &row, width, height, element);
    if (result == CU_SUCCESS && !count_rows(&entry, row, height)) {
        driver.cuMemFree_v2(allocated);
        result = CU_OUT_OF_MEMORY;
    }
    if (result == CU_SUCCESS) {
        *pointer = allocated;
        *pitch = row;
    }
    return finish(result, &entry, allocated);
}

/* ---- frees ---------------------------------------------------------------------------------- */

/* The entry goes before the memory does: as soon as that is free, another thread may get the same
   address. */
static int finish_free(int result, bool known, const struct entry *entry)
{
    if (known && result != CU_SUCCESS)
        table_put(entry);
    else if (known && entry->kind == TABLE_POOLED)
        settle_pools();
    else if (known)
        group_release(entry->bytes);
    return result;
}

int on_free(const struct hook *hook, PARAMS_pointer)
{
    struct entry entry;
    bool known = group_join() && table_take(TABLE_POINTER, pointer, &entry);

    return finish_free(REAL(hook, pointer)(ARGS_pointer), known, &entry);
}

int on_free_async(const struct hook *hook, PARAMS_free_async)
{
    struct entry entry;

    if (!group_join() || is_capturing(stream_of(hook, stream)))
        return REAL(hook, free_async)(ARGS_free_async);
    bool known = table_take(TABLE_POINTER, pointer, &entry);

    return finish_free(REAL(hook, free_async)(ARGS_free_async), known, &entry);
}

/* ---- memory that another process pays for --------------------------------------------------- */

int on_ipc(const struct hook *hook, PARAMS_ipc)
{
    return note_import(REAL(hook, ipc)(ARGS_ipc));
}

int on_external(const struct hook *hook, PARAMS_external)
{
    return note_import(REAL(hook, external)(ARGS_external));
}

/* ---- how much there is ---------------------------------------------------------------------- */

static uint64_t smaller(uint64_t left, uint64_t right)
{
    return left < right ? left : right;
}

int on_memory(const struct hook *hook, PARAMS_memory)
{
    int result = REAL(hook, memory)(ARGS_memory);

    if (result != CU_SUCCESS || !free || !total)
        return result;
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    int mode = begin_own_calls();

    settle_pools();
    end_own_calls(mode);
    struct group_usage usage = group_usage();
    uint64_t left = usage.limit_bytes > usage.used_bytes ? usage.limit_bytes - usage.used_bytes : 0;

    *free = smaller(*free, left);
    *total = smaller(*total, usage.limit_bytes);
    return result;
}

int on_total(const struct hook *hook, PARAMS_total)
{
    int result = REAL(hook, total)(ARGS_total);

    if (result != CU_SUCCESS || !bytes)
        return result;
    if (!group_join())
        return CU_SYSTEM_NOT_READY;
    *bytes = place_of_device(device) == OURS ? smaller(*bytes, group_usage().limit_bytes) : 0;
    return result;
}
