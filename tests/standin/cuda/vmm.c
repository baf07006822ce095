#define _GNU_SOURCE
#include "objects.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, PINNED = 1, HANDLE_POSIX_FD = 1 };

/* Memory exists until every create, import and retain is released and every mapping is unmapped. */
struct physical {
    struct object object; /* its length is 1: only its handle identifies it */
    struct allocation_properties properties;
    uint64_t bytes;
    uint64_t charged; /* 0 for host memory, and for another process' memory */
    unsigned held;    /* creates + imports + retains - releases */
    unsigned mapped;
};

struct mapping {
    uint64_t start, bytes;
    struct physical *physical;
    int access;
    struct mapping *next;
};

struct reservation {
    struct object object;
    struct mapping *mappings;
};

/* The content of a file descriptor for sharing. */
struct shared {
    uint64_t magic;
    uint32_t pid;
    uint64_t handle, bytes;
    struct allocation_properties properties;
};

static const uint64_t SHARED_MAGIC = 0x656c646e61682d73;

/* The GPU of the memory, in `gpu`; `charged` is 0 for host memory. */
static CUresult place_of(const struct location *location, unsigned *gpu, int *charged)
{
    int found = location->id;
    *charged = location->type == LOCATION_DEVICE || location->type == LOCATION_DEVICE_LOCALITY_DOMAIN;
    *gpu = 0;
    if (location->type == LOCATION_DEVICE_LOCALITY_DOMAIN)
        found &= 0xff;
    if (!*charged)
        return location->type >= LOCATION_HOST && location->type <= LOCATION_HOST_NUMA_CURRENT
                   ? SUCCESS
                   : INVALID_VALUE;
    if (gpu_of(found) < 0)
        return INVALID_DEVICE;
    *gpu = (unsigned)gpu_of(found);
    return SUCCESS;
}

PUBLIC CUresult cuMemCreate(CUmemHandle *handle, size_t bytes,
                            const struct allocation_properties *properties, unsigned long long flags)
{
    unsigned gpu;
    int charged;
    ENTER(cuMemCreate);
    if (handle == NULL || properties == NULL || properties->type != PINNED || flags != 0)
        return INVALID_VALUE;
    if (bytes == 0 || bytes % GRANULARITY != 0)
        return INVALID_VALUE;
    LOCKED;
    TRY(place_of(&properties->location, &gpu, &charged));
    if (charged && ledger_charge(gpu, HELD_PHYSICAL, bytes) != 0)
        return OUT_OF_MEMORY;
    struct physical *made = object_new(sizeof *made, PHYSICAL, gpu, 0, 0, NULL);
    made->properties = *properties;
    made->bytes = bytes;
    made->charged = charged ? bytes : 0;
    made->held = 1;
    *handle = made->object.start;
    return SUCCESS;
}

/* Addresses that write to several GPUs at once. They have no memory of their own. */
PUBLIC CUresult cuMulticastCreate(CUmemHandle *handle, const struct multicast_properties *properties)
{
    ENTER(cuMulticastCreate);
    if (handle == NULL || properties == NULL || properties->devices == 0 || properties->flags != 0 ||
        properties->bytes == 0 || properties->bytes % GRANULARITY != 0)
        return INVALID_VALUE;
    LOCKED;
    struct physical *made = object_new(sizeof *made, PHYSICAL, 0, 0, 0, NULL);
    made->bytes = properties->bytes;
    made->held = 1;
    *handle = made->object.start;
    return SUCCESS;
}

static void end_if_unused(struct physical *physical)
{
    if (physical->held > 0 || physical->mapped > 0)
        return;
    ledger_credit(physical->object.gpu, HELD_PHYSICAL, physical->charged);
    object_destroy(&physical->object);
}

/* The memory of a held handle. The handle of memory that is only mapped is invalid. */
static struct physical *physical_of(CUmemHandle handle)
{
    struct physical *found = object_of((CUhandle)(uintptr_t)handle, PHYSICAL);
    return found != NULL && found->held > 0 ? found : NULL;
}

PUBLIC CUresult cuMemRelease(CUmemHandle handle)
{
    ENTER(cuMemRelease);
    LOCKED;
    struct physical *physical = physical_of(handle);
    if (physical == NULL)
        return INVALID_VALUE;
    physical->held--;
    end_if_unused(physical);
    return SUCCESS;
}

PUBLIC CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment,
                                    CUdeviceptr wanted, unsigned long long flags)
{
    ENTER(cuMemAddressReserve);
    (void)wanted; /* a hint */
    if (pointer == NULL || flags != 0 || bytes == 0 || bytes % GRANULARITY != 0 ||
        (alignment & (alignment - 1)) != 0)
        return INVALID_VALUE;
    LOCKED;
    uint64_t start = address_take(bytes, alignment > GRANULARITY ? alignment : GRANULARITY);
    object_new(sizeof(struct reservation), RESERVATION, 0, start, bytes, NULL);
    *pointer = start;
    return SUCCESS;
}

PUBLIC CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
    ENTER(cuMemAddressFree);
    LOCKED;
    struct reservation *reservation = object_at(pointer, RESERVATION);
    if (reservation == NULL || reservation->object.start != pointer ||
        reservation->object.length != bytes || reservation->mappings != NULL)
        return INVALID_VALUE;
    object_destroy(&reservation->object);
    return SUCCESS;
}

static int overlap(const struct mapping *mapping, uint64_t start, uint64_t bytes)
{
    return mapping->start < start + bytes && start < mapping->start + mapping->bytes;
}

PUBLIC CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle,
                         unsigned long long flags)
{
    ENTER(cuMemMap);
    LOCKED;
    struct physical *physical = physical_of(handle);
    struct reservation *reservation = object_at(pointer, RESERVATION);
    if (physical == NULL || reservation == NULL || flags != 0 || bytes == 0 ||
        (pointer | bytes | offset) % GRANULARITY != 0)
        return INVALID_VALUE;
    if (bytes > physical->bytes || offset > physical->bytes - bytes ||
        pointer + bytes > reservation->object.start + reservation->object.length)
        return INVALID_VALUE;
    for (const struct mapping *one = reservation->mappings; one != NULL; one = one->next)
        if (overlap(one, pointer, bytes))
            return INVALID_VALUE;
    struct mapping *made = malloc(sizeof *made);
    if (made == NULL)
        abort();
    *made = (struct mapping){pointer, bytes, physical, 0, reservation->mappings};
    reservation->mappings = made;
    physical->mapped++;
    return SUCCESS;
}

/* The bytes of [start, start + bytes) that lie in mappings; -1 if a mapping is only partly in the
 * range. */
static int64_t mapped_bytes(const struct reservation *reservation, uint64_t start, uint64_t bytes)
{
    int64_t sum = 0;
    for (const struct mapping *one = reservation->mappings; one != NULL; one = one->next) {
        if (!overlap(one, start, bytes))
            continue;
        if (one->start < start || one->start + one->bytes > start + bytes)
            return -1;
        sum += (int64_t)one->bytes;
    }
    return sum;
}

PUBLIC CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    ENTER(cuMemUnmap);
    LOCKED;
    struct reservation *reservation = object_at(pointer, RESERVATION);
    if (reservation == NULL || mapped_bytes(reservation, pointer, bytes) != (int64_t)bytes)
        return INVALID_VALUE;
    for (struct mapping **place = &reservation->mappings; *place != NULL;) {
        struct mapping *one = *place;
        if (!overlap(one, pointer, bytes)) {
            place = &one->next;
            continue;
        }
        *place = one->next;
        one->physical->mapped--;
        end_if_unused(one->physical);
        free(one);
    }
    return SUCCESS;
}

static struct mapping *mapping_at(uint64_t pointer)
{
    const struct reservation *reservation = object_at(pointer, RESERVATION);
    struct mapping *one = reservation != NULL ? reservation->mappings : NULL;
    while (one != NULL && !overlap(one, pointer, 1))
        one = one->next;
    return one;
}

/* The handle of the memory mapped at an address, with one more reference. */
PUBLIC CUresult cuMemRetainAllocationHandle(CUmemHandle *handle, void *pointer)
{
    ENTER(cuMemRetainAllocationHandle);
    LOCKED;
    const struct mapping *mapping = mapping_at((uint64_t)(uintptr_t)pointer);
    if (mapping == NULL || handle == NULL)
        return INVALID_VALUE;
    mapping->physical->held++;
    *handle = mapping->physical->object.start;
    return SUCCESS;
}

PUBLIC CUresult cuMemExportToShareableHandle(void *shareable, CUmemHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle);
    LOCKED;
    const struct physical *physical = physical_of(handle);
    if (physical == NULL || shareable == NULL || type != HANDLE_POSIX_FD || flags != 0 ||
        !(physical->properties.handle_types & HANDLE_POSIX_FD))
        return INVALID_VALUE;
    struct shared shared = {SHARED_MAGIC, ledger_own->pid, handle, physical->bytes,
                            physical->properties};
    int file = memfd_create("gpu memory", MFD_CLOEXEC);
    if (file < 0 || pwrite(file, &shared, sizeof shared, 0) != sizeof shared)
        return OUT_OF_MEMORY;
    *(int *)shareable = file;
    return SUCCESS;
}

/* The process that made the memory is charged for it. */
PUBLIC CUresult cuMemImportFromShareableHandle(CUmemHandle *handle, void *shareable, int type)
{
    struct shared shared;
    ENTER(cuMemImportFromShareableHandle);
    LOCKED;
    if (handle == NULL || type != HANDLE_POSIX_FD ||
        pread((int)(intptr_t)shareable, &shared, sizeof shared, 0) != sizeof shared ||
        shared.magic != SHARED_MAGIC)
        return INVALID_VALUE;
    struct physical *physical = shared.pid == ledger_own->pid ? physical_of(shared.handle) : NULL;
    if (physical == NULL) {
        physical = object_new(sizeof *physical, PHYSICAL, 0, 0, 0, NULL);
        physical->properties = shared.properties;
        physical->bytes = shared.bytes;
    }
    physical->held++;
    *handle = physical->object.start;
    return SUCCESS;
}
