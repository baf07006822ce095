/* Errors of GPUs. A test writes them into files beside the ledger: STATE.events has a line
 * "GPU TYPE DATA" for each event, STATE.errors and STATE.recovery a number for each GPU. */
#include "nvml.h"

#include <limits.h>
#include <stdio.h>

enum { MOST_SETS = 8, RECOVERY_ACTION = 230, TIMEOUT = 10, UNSIGNED = 1 };

struct event_set {
    int used;
    long read; /* bytes of the file of events */
    unsigned long long types[MOST_GPUS];
};

struct event {
    nvmlDevice device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
};

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    int type;
    nvmlReturn result;
    unsigned long long value;
};

static struct event_set sets[MOST_SETS];

static FILE *open_file(const char *what)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.%s", node_get()->state, what);
    return fopen(path, "re");
}

static unsigned long long number(const char *what, unsigned gpu)
{
    unsigned long long read = 0;
    FILE *file = open_file(what);
    if (file == NULL)
        return 0;
    for (unsigned i = 0; i <= gpu; i++)
        if (fscanf(file, "%llu", &read) != 1)
            read = 0;
    fclose(file);
    return read;
}

PUBLIC nvmlReturn nvmlEventSetCreate(struct event_set **set)
{
    NVML_ENTER;
    for (unsigned i = 0; i < MOST_SETS; i++)
        if (!sets[i].used) {
            sets[i] = (struct event_set){.used = 1};
            FILE *file = open_file("events");
            if (file != NULL) { /* earlier events are not delivered */
                fseek(file, 0, SEEK_END);
                sets[i].read = ftell(file);
                fclose(file);
            }
            *set = &sets[i];
            return NVML_SUCCESS;
        }
    return NVML_INSUFFICIENT_RESOURCES;
}

PUBLIC nvmlReturn nvmlDeviceRegisterEvents(nvmlDevice device, unsigned long long types,
                                           struct event_set *set)
{
    NVML_GPU(device);
    set->types[gpu] |= types;
    return NVML_SUCCESS;
}

/* It does not wait: a caller with a timeout calls again. */
PUBLIC nvmlReturn nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned ms)
{
    NVML_ENTER;
    (void)ms;
    FILE *file = open_file("events");
    if (file == NULL)
        return TIMEOUT;
    unsigned gpu;
    nvmlReturn result = TIMEOUT;
    fseek(file, set->read, SEEK_SET);
    while (result == TIMEOUT && fscanf(file, "%u %llu %llu", &gpu, &event->type, &event->data) == 3) {
        set->read = ftell(file);
        if (gpu < MOST_GPUS && (set->types[gpu] & event->type) != 0) {
            event->device = &node_get()->gpus[gpu];
            event->gpu_instance = event->compute_instance = ~0u;
            result = NVML_SUCCESS;
        }
    }
    fclose(file);
    return result;
}

PUBLIC nvmlReturn nvmlDeviceGetTotalEccErrors(nvmlDevice device, int type, int counter,
                                              unsigned long long *count)
{
    NVML_GPU(device);
    *count = type == 1 && counter == 0 ? number("errors", gpu) : 0; /* uncorrected, volatile */
    return NVML_SUCCESS;
}

PUBLIC nvmlReturn nvmlDeviceGetFieldValues(nvmlDevice device, int count, struct field *fields)
{
    NVML_GPU(device);
    for (int i = 0; i < count; i++) {
        fields[i].result = fields[i].id == RECOVERY_ACTION ? NVML_SUCCESS : NVML_NOT_SUPPORTED;
        fields[i].type = UNSIGNED;
        fields[i].value = number("recovery", gpu);
    }
    return NVML_SUCCESS;
}
