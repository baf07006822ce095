/* Arrays and mipmapped arrays. */
#include "objects.h"

enum { ROUND = 64 << 10 };

/* Bits of an element, or of a block of 4 x 4 if it is compressed. */
struct format {
    int format;
    int bits;
    int compressed;
};

static const struct format formats[] = {
    {0x50, 32, 0}, {0x51, 16, 0}, {0x52, 32, 0},                               /* packed */
    {0x53, 12, 0}, {0x54, 24, 0}, {0x55, 16, 0}, {0x56, 32, 0}, {0x57, 24, 0}, /* semi-planar */
    {0x58, 48, 0}, {0x59, 12, 0}, {0x5a, 24, 0}, {0x5b, 16, 0}, {0x5c, 32, 0}, /* planar */
    {0x5d, 24, 0}, {0x5e, 48, 0},
    {0x91, 64, 1}, {0x92, 64, 1}, {0x93, 128, 1}, {0x94, 128, 1}, {0x95, 128, 1}, /* BC1 to BC3 */
    {0x96, 128, 1}, {0x97, 64, 1}, {0x98, 64, 1}, {0x99, 128, 1}, {0x9a, 128, 1}, /* BC4, BC5 */
    {0x9b, 128, 1}, {0x9c, 128, 1}, {0x9d, 128, 1}, {0x9e, 128, 1},               /* BC6H, BC7 */
    {0x9f, 24, 0}, {0xa1, 24, 0}, {0xa2, 16, 0}, {0xa3, 32, 0}, {0xa4, 32, 0}, /* P010 to P216 */
    {0xa5, 16, 0}, {0xa6, 32, 0}, {0xa7, 32, 0}, {0xa8, 32, 0}, {0xa9, 32, 0}, /* YUY2 to Y410 */
    {0xb0, 12, 0}, {0xb1, 64, 0}, {0xb2, 24, 0}, {0xb3, 48, 0}, {0xb4, 24, 0}, /* NV12 and 4:4:4 */
    {0xb5, 48, 0},
    {0xc0, 8, 0}, {0xc1, 16, 0}, {0xc2, 32, 0}, {0xc3, 16, 0}, {0xc4, 32, 0}, {0xc5, 64, 0},
    {0xc6, 8, 0}, {0xc7, 16, 0}, {0xc8, 32, 0}, {0xc9, 16, 0}, {0xca, 32, 0}, {0xcb, 64, 0},
};

/* Formats whose elements have as many channels as the descriptor says. */
static const struct format channels[] = {
    {0x01, 8, 0}, {0x02, 16, 0}, {0x03, 32, 0}, {0x08, 8, 0},
    {0x09, 16, 0}, {0x0a, 32, 0}, {0x10, 16, 0}, {0x20, 32, 0},
};

struct array {
    struct object object;
    struct array3d_descriptor descriptor;
    unsigned levels; /* of a mipmapped array; 0 for a plain one */
    uint64_t charged;
    struct array *whole; /* the mipmapped array that has this level */
    struct array *level[16];
};

static CUresult element_bits(const struct array3d_descriptor *of, uint64_t *bits, int *compressed)
{
    *compressed = 0;
    for (unsigned i = 0; i < sizeof channels / sizeof *channels; i++)
        if (channels[i].format == of->format) {
            *bits = (uint64_t)channels[i].bits * of->channels;
            return of->channels == 1 || of->channels == 2 || of->channels == 4 ? SUCCESS
                                                                               : INVALID_VALUE;
        }
    for (unsigned i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].format == of->format) {
            *bits = (uint64_t)formats[i].bits;
            *compressed = formats[i].compressed;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

static uint64_t at_least_1(uint64_t size)
{
    return size > 0 ? size : 1;
}

/* The bytes of one level of an array, before rounding. */
static uint64_t level_bytes(const struct array3d_descriptor *of, unsigned level, uint64_t bits,
                            int compressed)
{
    uint64_t width = at_least_1(of->width >> level), height = at_least_1(of->height >> level);
    uint64_t depth = at_least_1(of->depth);
    if (!(of->flags & (ARRAY_LAYERED | ARRAY_CUBEMAP)))
        depth = at_least_1(depth >> level);
    if (compressed) {
        width = (width + 3) / 4;
        height = (height + 3) / 4;
    }
    return (width * height * depth * bits + 7) / 8;
}

static unsigned most_levels(const struct array3d_descriptor *of)
{
    uint64_t longest = of->width > of->height ? of->width : of->height;
    if (!(of->flags & (ARRAY_LAYERED | ARRAY_CUBEMAP)) && of->depth > longest)
        longest = of->depth;
    unsigned levels = 1;
    while (longest >>= 1)
        levels++;
    return levels;
}

static CUresult array_bytes(const struct array3d_descriptor *of, unsigned levels, uint64_t *bytes)
{
    uint64_t bits;
    int compressed;
    TRY(element_bits(of, &bits, &compressed));
    if (of->width == 0 || of->width > 131072 || of->height > 65536 || of->depth > 16384)
        return INVALID_VALUE;
    *bytes = 0;
    for (unsigned level = 0; level < levels; level++)
        *bytes += level_bytes(of, level, bits, compressed);
    *bytes = (*bytes + ROUND - 1) / ROUND * ROUND;
    return SUCCESS;
}

/* An array whose memory is mapped later occupies none itself. */
static CUresult create(CUhandle *handle, const struct array3d_descriptor *of, unsigned levels)
{
    struct object *context;
    uint64_t bytes;
    LOCKED;
    TRY(current_context(&context));
    TRY(capture_forbids());
    if (handle == NULL)
        return INVALID_VALUE;
    if (levels > most_levels(of))
        levels = most_levels(of);
    TRY(array_bytes(of, levels > 0 ? levels : 1, &bytes));
    if (of->flags & (ARRAY_SPARSE | ARRAY_DEFERRED_MAPPING))
        bytes = 0;
    if (ledger_charge(context->gpu, HELD_ARRAY, bytes) != 0)
        return OUT_OF_MEMORY;
    struct array *made = object_new(sizeof *made, ARRAY, context->gpu, 0, 0, context);
    made->descriptor = *of;
    made->levels = levels;
    made->charged = bytes;
    *handle = &made->object;
    return SUCCESS;
}

void array_release(struct object *object)
{
    struct array *array = (struct array *)object;
    ledger_credit(object->gpu, HELD_ARRAY, array->charged);
    for (unsigned level = 0; level < 16; level++)
        if (array->level[level] != NULL)
            object_destroy(&array->level[level]->object);
    object_destroy(object);
}

static CUresult destroy(CUhandle handle, int mipmapped)
{
    LOCKED;
    struct array *array = object_of(handle, ARRAY);
    if (array == NULL || (array->levels > 0) != mipmapped || array->whole != NULL)
        return INVALID_HANDLE;
    TRY(capture_forbids());
    array_release(&array->object);
    return SUCCESS;
}

PUBLIC CUresult cuArrayCreate(CUhandle *array, const struct array_descriptor_v1 *of)
{
    ENTER(cuArrayCreate);
    if (of == NULL)
        return INVALID_VALUE;
    const struct array3d_descriptor wide = {of->width, of->height, 0, of->format, of->channels, 0};
    return create(array, &wide, 0);
}

PUBLIC CUresult cuArrayCreate_v2(CUhandle *array, const struct array_descriptor *of)
{
    ENTER(cuArrayCreate_v2);
    if (of == NULL)
        return INVALID_VALUE;
    const struct array3d_descriptor wide = {of->width, of->height, 0, of->format, of->channels, 0};
    return create(array, &wide, 0);
}

PUBLIC CUresult cuArray3DCreate(CUhandle *array, const struct array3d_descriptor_v1 *of)
{
    ENTER(cuArray3DCreate);
    if (of == NULL)
        return INVALID_VALUE;
    const struct array3d_descriptor wide = {of->width,  of->height,   of->depth,
                                            of->format, of->channels, of->flags};
    return create(array, &wide, 0);
}

PUBLIC CUresult cuArray3DCreate_v2(CUhandle *array, const struct array3d_descriptor *of)
{
    ENTER(cuArray3DCreate_v2);
    return of == NULL ? INVALID_VALUE : create(array, of, 0);
}

PUBLIC CUresult cuArrayDestroy(CUhandle array)
{
    ENTER(cuArrayDestroy);
    return destroy(array, 0);
}

PUBLIC CUresult cuMipmappedArrayCreate(CUhandle *array, const struct array3d_descriptor *of,
                                       unsigned levels)
{
    ENTER(cuMipmappedArrayCreate);
    return of == NULL || levels == 0 ? INVALID_VALUE : create(array, of, levels);
}

PUBLIC CUresult cuMipmappedArrayDestroy(CUhandle array)
{
    ENTER(cuMipmappedArrayDestroy);
    return destroy(array, 1);
}
