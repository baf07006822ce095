/* Arrays. The driver chooses their layout, so the shim computes an upper bound of their size. */
#include "devices.h"
#include "group.h"
#include "hooks.h"

enum { ARRAY_GRANULE = 64 << 10 };

struct format {
    short format, channel_bits, element_bits; /* element_bits is 0 unless the format fixes the channels */
    short block; /* the width and height of a block of element_bits */
};

static const struct format formats[] = {
    {0x01, 8, 0, 1},  {0x02, 16, 0, 1}, {0x03, 32, 0, 1}, /* unsigned integers */
    {0x08, 8, 0, 1},  {0x09, 16, 0, 1}, {0x0a, 32, 0, 1}, /* signed integers */
    {0x10, 16, 0, 1}, {0x20, 32, 0, 1},                   /* half, float */
    {0x50, 0, 32, 1},                                     /* 10 + 10 + 10 + 2 bits */
    {0x91, 0, 64, 4}, {0x92, 0, 64, 4},                   /* BC1 */
    {0x93, 0, 128, 4}, {0x94, 0, 128, 4}, {0x95, 0, 128, 4}, {0x96, 0, 128, 4}, /* BC2, BC3 */
    {0x97, 0, 64, 4}, {0x98, 0, 64, 4},                   /* BC4 */
    {0x99, 0, 128, 4}, {0x9a, 0, 128, 4}, {0x9b, 0, 128, 4}, {0x9c, 0, 128, 4}, /* BC5, BC6H */
    {0x9d, 0, 128, 4}, {0x9e, 0, 128, 4},                 /* BC7 */
    /* Video, of all planes together. */
    {0xb0, 0, 12, 1}, {0x53, 0, 12, 1}, {0x59, 0, 12, 1}, /* 4:2:0, 8 bits */
    {0x9f, 0, 24, 1}, {0xa1, 0, 24, 1}, {0x54, 0, 24, 1}, {0x5a, 0, 24, 1}, /* 4:2:0, 16 bits */
    {0xa2, 0, 16, 1}, {0xa5, 0, 16, 1}, {0x51, 0, 16, 1}, {0x55, 0, 16, 1}, /* 4:2:2, 8 bits */
    {0x5b, 0, 16, 1},
    {0xa3, 0, 32, 1}, {0xa4, 0, 32, 1}, {0xa6, 0, 32, 1}, {0xa7, 0, 32, 1}, /* 4:2:2, 16 bits */
    {0x56, 0, 32, 1}, {0x5c, 0, 32, 1},
    {0xa8, 0, 32, 1}, {0xa9, 0, 32, 1},                   /* AYUV, Y410 */
    {0x52, 0, 24, 1}, {0xb2, 0, 24, 1}, {0xb4, 0, 24, 1}, {0x57, 0, 24, 1}, /* 4:4:4, 8 bits */
    {0x5d, 0, 24, 1},
    {0xb1, 0, 64, 1},                                     /* Y416 */
    {0xb3, 0, 48, 1}, {0xb5, 0, 48, 1}, {0x58, 0, 48, 1}, {0x5e, 0, 48, 1}, /* 4:4:4, 16 bits */
    /* Normalized integers of one, two, four channels. */
    {0xc0, 0, 8, 1},  {0xc1, 0, 16, 1}, {0xc2, 0, 32, 1}, {0xc3, 0, 16, 1}, {0xc4, 0, 32, 1},
    {0xc5, 0, 64, 1}, {0xc6, 0, 8, 1},  {0xc7, 0, 16, 1}, {0xc8, 0, 32, 1}, {0xc9, 0, 16, 1},
    {0xca, 0, 32, 1}, {0xcb, 0, 64, 1},
};

/* An unknown format has the largest elements: four channels of 32 bits. */
static struct format find_format(int number)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].format == number)
            return formats[i];
    return (struct format){.element_bits = 128, .block = 1};
}

static unsigned __int128 at_least_one(size_t value)
{
    return value > 0 ? value : 1;
}

static unsigned __int128 blocks(unsigned __int128 length, int block)
{
    return (length + (unsigned)block - 1) / (unsigned)block;
}

/* The bytes of an array with `levels` mip levels. 0: cuMemCreate allocates its memory. */
static uint64_t array_bytes(const struct cu_array_3d *array, unsigned levels)
{
    struct format format = find_format(array->format);
    unsigned __int128 bits = 0, width = at_least_one(array->width), height = at_least_one(array->height),
                      depth = at_least_one(array->depth);
    bool layers = array->flags & (CU_ARRAY_LAYERED | CU_ARRAY_CUBEMAP);
    unsigned element = format.element_bits ? (unsigned)format.element_bits
                                           : (unsigned)format.channel_bits * array->channels;

    if (array->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED))
        return 0;
    for (unsigned level = 0; level < (levels ? levels : 1) && level < 64; level++) {
        bits += blocks(width, format.block) * blocks(height, format.block) * depth * element;
        width = width > 1 ? width / 2 : 1;
        height = height > 1 ? height / 2 : 1;
        depth = !layers && depth > 1 ? depth / 2 : depth;
    }
    unsigned __int128 bytes = (bits / 8 + ARRAY_GRANULE - 1) / ARRAY_GRANULE * ARRAY_GRANULE;

    return bytes > UINT64_MAX ? UINT64_MAX : (uint64_t)bytes;
}

/* If a pointer is missing, the driver returns the error. */
#define CREATE(ABI, LEVELS, ...)                                              \
    if (!array || !description)                                               \
        return REAL(hook, ABI)(ARGS_##ABI);                                   \
    struct cu_array_3d whole = {__VA_ARGS__, .format = description->format,   \
                                .channels = description->channels};           \
    struct entry entry = {.kind = TABLE_ARRAY, .bytes = array_bytes(&whole, LEVELS)}; \
    int result = begin_allocation(&entry);                                    \
    if (result != CU_SUCCESS)                                                 \
        return result;                                                        \
    result = REAL(hook, ABI)(ARGS_##ABI);                                     \
    return finish_allocation(result, &entry, result == CU_SUCCESS ? (uintptr_t)*array : 0)

#define FLAT .width = description->width, .height = description->height
#define DEEP FLAT, .depth = description->depth, .flags = description->flags

int on_array(const struct hook *hook, PARAMS_array)
{
    CREATE(array, 1, FLAT);
}

int on_array_3d(const struct hook *hook, PARAMS_array_3d)
{
    CREATE(array_3d, 1, DEEP);
}

int on_mipmap(const struct hook *hook, PARAMS_mipmap)
{
    CREATE(mipmap, levels, DEEP);
}

int on_array_destroy(const struct hook *hook, PARAMS_handle)
{
    struct entry entry;
    bool known = group_join() && table_take(TABLE_ARRAY, (uintptr_t)handle, &entry);
    int result = REAL(hook, handle)(ARGS_handle);

    if (known && result == CU_SUCCESS)
        group_release(entry.bytes);
    else if (known)
        table_put(&entry);
    return result;
}
