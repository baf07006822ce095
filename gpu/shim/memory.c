/* Plain allocations of device memory, and its size. */
#include "devices.h"
#include "group.h"
#include "hooks.h"

enum { PITCH_ALIGNMENT = 512 }; /* the largest pitch alignment of NVIDIA's GPUs */
enum { BLOCK = 512, PAGE = 4096 }; /* the units of device memory and managed memory */

static int begin(struct entry *entry, uint64_t bytes, uint64_t block)
{
    *entry = (struct entry){.kind = TABLE_POINTER, .bytes = round_up(bytes, block)};
    return begin_allocation(entry);
}

#define ALLOCATE(ACT, ABI, BLOCK)                                                         \
    int ACT(const struct hook *hook, PARAMS_##ABI)                                        \
    {                                                                                     \
        struct entry entry;                                                               \
        int result = begin(&entry, bytes, BLOCK);                                         \
                                                                                          \
        if (result != CU_SUCCESS)                                                         \
            return result;                                                                \
        result = REAL(hook, ABI)(ARGS_##ABI);                                             \
        return finish_allocation(result, &entry, result == CU_SUCCESS ? *pointer : 0);    \
    }

ALLOCATE(on_alloc, alloc, BLOCK)
ALLOCATE(on_managed, managed, PAGE)

/* An upper bound of the bytes of `height` padded rows. */
static uint64_t bytes_of_rows(uint64_t width, uint64_t height)
{
    unsigned __int128 bytes = (unsigned __int128)width + PITCH_ALIGNMENT - 1;

    bytes = bytes / PITCH_ALIGNMENT * PITCH_ALIGNMENT * height;
    return bytes > UINT64_MAX ? UINT64_MAX : (uint64_t)bytes;
}

/* If the driver's rows are longer than counted and do not fit, free them again. */
int on_pitch(const struct hook *hook, PARAMS_pitch)
{
    struct entry entry;
    uint64_t allocated = 0;
    size_t row = 0;
    int result = begin(&entry, bytes_of_rows(width, height), BLOCK);

    if (result != CU_SUCCESS)
        return result;
    result = REAL(hook, pitch)(pointer ? &allocated : NULL, pitch ? &row : NULL, width, height, element);
    if (result == CU_SUCCESS) {
        bool within = group_replace(entry.bytes, row * height);

        entry.bytes = row * height;
        if (within) {
            *pointer = allocated;
            *pitch = row;
        } else {
            driver.cuMemFree_v2(allocated);
            group_denied();
            result = CU_OUT_OF_MEMORY;
        }
    }
    return finish_allocation(result, &entry, allocated);
}

/* The entry is removed before the call: another thread may get the same address right after it. */
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
