/*
 * What libnvidia-ml.so.1 exports in place of NVIDIA's management library: how much memory a GPU has, and
 * which processes use it, as far as that is the group's. nvidia-smi and frameworks that size their memory
 * by it so see what cuMemGetInfo says. All else goes to the real library by itself, and nothing here
 * limits anything: NVML allocates none.
 *
 * Structures as in nvml.h of driver 615 and in nvidia-ml-py 13.615.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "group.h"
#include "old_glibc.h"
#include "say.h"

#define REAL_LIBRARY "libpfnvidia-ml-real.so.1"

enum { NVML_SUCCESS = 0, NVML_FUNCTION_NOT_FOUND = 13, NVML_NOT_READY = 27 };
enum { UUID_BYTES = 96 }; /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */

struct nvml_memory {
    uint64_t total, free, used;
};

struct nvml_memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

struct nvml_process_v1 {
    uint32_t pid;
    uint64_t used;
};

struct nvml_process {
    uint32_t pid;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
};

struct nvml_sample {
    uint32_t pid;
    uint64_t time;
    uint32_t sm, memory, encoder, decoder;
};

struct nvml_utilization {
    uint64_t time;
    uint32_t pid, sm, memory, encoder, decoder, jpeg, optical_flow;
};

struct nvml_utilizations {
    uint32_t version, count;
    uint64_t since;
    struct nvml_utilization *each;
};

struct nvml_detail {
    uint32_t pid;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
    uint64_t protected_used;
};

struct nvml_details {
    uint32_t version, mode, count;
    struct nvml_detail *each;
};

_Static_assert(sizeof(struct nvml_memory_v2) == 40 && sizeof(struct nvml_process) == 24, "abi");
_Static_assert(sizeof(struct nvml_sample) == 32 && sizeof(struct nvml_utilization) == 40, "abi");
_Static_assert(sizeof(struct nvml_detail) == 32 && sizeof(struct nvml_details) == 24, "abi");

#define PARAMS_memory void *device, struct nvml_memory *memory
#define ARGS_memory device, memory
#define PARAMS_memory_v2 void *device, struct nvml_memory_v2 *memory
#define ARGS_memory_v2 device, memory
#define PARAMS_processes_v1 void *device, unsigned *count, struct nvml_process_v1 *each
#define ARGS_processes_v1 device, count, each
#define PARAMS_processes void *device, unsigned *count, struct nvml_process *each
#define ARGS_processes device, count, each
#define PARAMS_samples void *device, struct nvml_sample *each, unsigned *count, uint64_t since
#define ARGS_samples device, each, count, since
#define PARAMS_utilizations void *device, struct nvml_utilizations *all
#define ARGS_utilizations device, all
#define PARAMS_details void *device, struct nvml_details *all
#define ARGS_details device, all

/* HOOK(exported name, parameters, what is done to the real answer) */
#define HOOKS(HOOK)                                                             \
    HOOK(nvmlDeviceGetMemoryInfo, memory, limit_memory)                         \
    HOOK(nvmlDeviceGetMemoryInfo_v2, memory_v2, limit_memory_v2)                \
    HOOK(nvmlDeviceGetComputeRunningProcesses, processes_v1, keep_processes_v1) \
    HOOK(nvmlDeviceGetComputeRunningProcesses_v2, processes, keep_processes)    \
    HOOK(nvmlDeviceGetComputeRunningProcesses_v3, processes, keep_processes)    \
    HOOK(nvmlDeviceGetGraphicsRunningProcesses, processes_v1, keep_processes_v1) \
    HOOK(nvmlDeviceGetGraphicsRunningProcesses_v2, processes, keep_processes)   \
    HOOK(nvmlDeviceGetGraphicsRunningProcesses_v3, processes, keep_processes)   \
    HOOK(nvmlDeviceGetMPSComputeRunningProcesses, processes_v1, keep_processes_v1) \
    HOOK(nvmlDeviceGetMPSComputeRunningProcesses_v2, processes, keep_processes) \
    HOOK(nvmlDeviceGetMPSComputeRunningProcesses_v3, processes, keep_processes) \
    HOOK(nvmlDeviceGetProcessUtilization, samples, keep_samples)                \
    HOOK(nvmlDeviceGetProcessesUtilizationInfo, utilizations, keep_utilizations) \
    HOOK(nvmlDeviceGetRunningProcessDetailList, details, keep_details)

static int (*get_uuid)(void *device, char *text, unsigned size);

/* ---- which GPU ------------------------------------------------------------------------------ */

static int digit(char character)
{
    if (character >= '0' && character <= '9')
        return character - '0';
    if (character >= 'a' && character <= 'f')
        return character - 'a' + 10;
    return character >= 'A' && character <= 'F' ? character - 'A' + 10 : -1;
}

/* The 16 bytes of "GPU-…". */
static bool parse_uuid(const char *text, uint8_t uuid[16])
{
    int digits = 0;

    text = strchr(text, '-');
    for (; text && *text && digits < 32; text++) {
        if (*text == '-')
            continue;
        int value = digit(*text);

        if (value < 0)
            return false;
        uuid[digits / 2] = (uint8_t)(uuid[digits / 2] << 4 | value);
        digits++;
    }
    return digits == 32;
}

static bool is_ours(void *device)
{
    char text[UUID_BYTES] = "";
    uint8_t uuid[16] = {0};

    return get_uuid && get_uuid(device, text, sizeof text) == NVML_SUCCESS &&
           parse_uuid(text, uuid) && group_has_gpu(uuid);
}

/* ---- memory --------------------------------------------------------------------------------- */

static void limit(uint64_t *total, uint64_t *free, uint64_t *used)
{
    struct group_usage usage = group_usage();
    uint64_t left = usage.limit_bytes > usage.used_bytes ? usage.limit_bytes - usage.used_bytes : 0;

    *total = *total < usage.limit_bytes ? *total : usage.limit_bytes;
    *free = *free < left ? *free : left;
    *used = usage.used_bytes;
}

static void limit_memory(PARAMS_memory)
{
    if (is_ours(device))
        limit(&memory->total, &memory->free, &memory->used);
}

static void limit_memory_v2(PARAMS_memory_v2)
{
    uint64_t total = memory->total;

    if (!is_ours(device))
        return;
    limit(&memory->total, &memory->free, &memory->used);
    if (memory->total < total)
        memory->reserved = 0; /* the driver keeps that of the GPU, not of the group's part */
}

/* ---- processes ------------------------------------------------------------------------------ */

/* Keep the entries of the group's processes, in place; how many there are then. */
static unsigned keep(void *entries, unsigned count, size_t size, size_t pid_at)
{
    char *each = entries;
    unsigned kept = 0;

    for (unsigned i = 0; each && i < count; i++) {
        uint32_t pid;

        memcpy(&pid, each + i * size + pid_at, sizeof pid);
        if (group_has_process(pid))
            memmove(each + kept++ * size, each + i * size, size);
    }
    return each ? kept : count;
}

static void keep_processes_v1(PARAMS_processes_v1)
{
    *count = keep(each, *count, sizeof *each, offsetof(struct nvml_process_v1, pid));
}

static void keep_processes(PARAMS_processes)
{
    *count = keep(each, *count, sizeof *each, offsetof(struct nvml_process, pid));
}

static void keep_samples(PARAMS_samples)
{
    *count = keep(each, *count, sizeof *each, offsetof(struct nvml_sample, pid));
}

static void keep_utilizations(PARAMS_utilizations)
{
    all->count = keep(all->each, all->count, sizeof *all->each, offsetof(struct nvml_utilization, pid));
}

static void keep_details(PARAMS_details)
{
    all->count = keep(all->each, all->count, sizeof *all->each, offsetof(struct nvml_detail, pid));
}

/* ---- exports -------------------------------------------------------------------------------- */

enum {
#define INDEX(NAME, ABI, ACT) AT_##NAME,
    HOOKS(INDEX)
#undef INDEX
        HOOK_COUNT
};

static void *real[HOOK_COUNT];
static __thread int depth __attribute__((tls_model("initial-exec")));

#define STUB(NAME, ABI, ACT)                                              \
    __attribute__((visibility("default"))) int NAME(PARAMS_##ABI);        \
    int NAME(PARAMS_##ABI)                                                \
    {                                                                     \
        if (!real[AT_##NAME])                                             \
            return NVML_FUNCTION_NOT_FOUND;                               \
        if (depth == 0 && !group_look())                                  \
            return NVML_NOT_READY;                                        \
        depth++;                                                          \
        int result = ((int (*)(PARAMS_##ABI))real[AT_##NAME])(ARGS_##ABI); \
        depth--;                                                          \
        if (result == NVML_SUCCESS && depth == 0) {                       \
            depth++;                                                      \
            ACT(ARGS_##ABI);                                              \
            depth--;                                                      \
        }                                                                 \
        return result;                                                    \
    }
HOOKS(STUB)
#undef STUB

__attribute__((constructor)) static void load(void)
{
    void *library = dlopen(REAL_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);

    if (!library) {
        say("NVIDIA's library is not loaded as " REAL_LIBRARY ": nothing is known of GPUs");
        return;
    }
    get_uuid = (int (*)(void *, char *, unsigned))dlsym(library, "nvmlDeviceGetUUID");
#define FIND(NAME, ABI, ACT) real[AT_##NAME] = dlsym(library, #NAME);
    HOOKS(FIND)
#undef FIND
}
