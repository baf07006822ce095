/* Initialisation and shutdown, the devices and their memory. */
#include "nvml.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { MOST_FAILURES = 64, MEMORY_V2 = 0x02000028 };

struct memory_v1 {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;
static unsigned seen[MOST_FAILURES]; /* how often the call of each failure was made */

/* The result that the node's file sets for this call; 0: none. */
static nvmlReturn failure(const char *call)
{
    const struct json *all = node_get()->failures, *one = all != NULL ? all->first : NULL;
    for (unsigned i = 0; one != NULL && i < MOST_FAILURES; one = one->next, i++) {
        if (strcmp(json_text(one, "call", ""), call) != 0)
            continue;
        if (__atomic_add_fetch(&seen[i], 1, __ATOMIC_RELAXED) != json_number(one, "nth", 1))
            continue;
        if (strcmp(json_text(one, "result", ""), "kill") == 0)
            raise(SIGKILL);
        return (nvmlReturn)json_number(one, "result", NVML_UNKNOWN);
    }
    return NVML_SUCCESS;
}

nvmlReturn nvml_enter(const char *call, int needs_init)
{
    if (node_get() == NULL)
        return needs_init ? NVML_UNINITIALIZED : NVML_DRIVER_NOT_LOADED;
    nvmlReturn result = failure(call);
    if (result == NVML_SUCCESS && needs_init && __atomic_load_n(&users, __ATOMIC_ACQUIRE) == 0)
        return NVML_UNINITIALIZED;
    return result;
}

int nvml_index(nvmlDevice device)
{
    const struct node *node = node_get();
    return device < node->gpus || device >= node->gpus + node->gpu_count
               ? -1
               : (int)(device - node->gpus);
}

static nvmlReturn init(const char *call)
{
    nvmlReturn result = nvml_enter(call, 0);
    if (result != NVML_SUCCESS)
        return result;
    const struct node *node = node_get();
    pthread_mutex_lock(&mutex);
    if (ledger == NULL && ledger_open(node->state, node->slice_ns, node->sample_ns) != 0)
        result = NVML_UNKNOWN;
    else
        users++;
    pthread_mutex_unlock(&mutex);
    return result;
}

PUBLIC nvmlReturn nvmlInit(void)
{
    return init(__func__);
}

PUBLIC nvmlReturn nvmlInit_v2(void)
{
    return init(__func__);
}

PUBLIC nvmlReturn nvmlInitWithFlags(unsigned flags)
{
    return flags > 3 ? NVML_INVALID_ARGUMENT : init(__func__);
}

PUBLIC nvmlReturn nvmlShutdown(void)
{
    NVML_ENTER;
    __atomic_sub_fetch(&users, 1, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

PUBLIC const char *nvmlErrorString(nvmlReturn result)
{
    static const char *const texts[] = {"Success",       "Uninitialized",          "Invalid Argument",
                                        "Not Supported", "Insufficient Permissions", "",
                                        "Not Found",     "Insufficient Size"};
    return result >= 0 && result <= NVML_INSUFFICIENT_SIZE ? texts[result] : "Unknown Error";
}

static nvmlReturn text(char *room, unsigned length, const char *content)
{
    if (room == NULL)
        return NVML_INVALID_ARGUMENT;
    if (length <= strlen(content))
        return NVML_INSUFFICIENT_SIZE;
    strcpy(room, content);
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    NVML_ENTER;
    return text(version, length, node_get()->driver);
}

PUBLIC nvmlReturn nvmlDeviceGetCount(unsigned *count)
{
    NVML_ENTER;
    *count = node_get()->opened_count;
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlDeviceGetCount_v2(unsigned *count)
{
    NVML_ENTER;
    *count = node_get()->opened_count;
    return NVML_SUCCESS;
}

static nvmlReturn by_index(unsigned index, nvmlDevice *device)
{
    if (device == NULL || index >= node_get()->opened_count)
        return NVML_INVALID_ARGUMENT;
    *device = &node_get()->gpus[node_get()->opened[index]];
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice *device)
{
    NVML_ENTER;
    return by_index(index, device);
}

PUBLIC nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice *device)
{
    NVML_ENTER;
    return by_index(index, device);
}

PUBLIC nvmlReturn nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice *device)
{
    NVML_ENTER;
    for (unsigned i = 0; uuid != NULL && i < node_get()->opened_count; i++)
        if (strcmp(node_get()->gpus[node_get()->opened[i]].uuid, uuid) == 0)
            return by_index(i, device);
    return uuid == NULL ? NVML_INVALID_ARGUMENT : NVML_NOT_FOUND;
}

PUBLIC nvmlReturn nvmlDeviceGetUUID(nvmlDevice device, char *uuid, unsigned length)
{
    NVML_GPU(device);
    return text(uuid, length, node_get()->gpus[gpu].uuid);
}

static uint64_t resident(unsigned gpu)
{
    ledger_lock();
    ledger_reap();
    uint64_t bytes = ledger_resident(gpu);
    ledger_unlock();
    return bytes;
}

/* The first form counts the driver's memory as used. */
PUBLIC nvmlReturn nvmlDeviceGetMemoryInfo(nvmlDevice device, struct memory_v1 *memory)
{
    NVML_GPU(device);
    memory->total = device->bytes;
    memory->used = device->reserved_bytes + resident(gpu);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlDeviceGetMemoryInfo_v2(nvmlDevice device, struct memory_v2 *memory)
{
    NVML_GPU(device);
    if (memory->version != MEMORY_V2)
        return NVML_VERSION_MISMATCH;
    memory->total = device->bytes;
    memory->reserved = device->reserved_bytes;
    memory->used = resident(gpu);
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}
