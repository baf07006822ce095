#define _GNU_SOURCE
#include "node.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct node loaded;
static int found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load_gpu(struct node_gpu *gpu, const struct json *from, unsigned index)
{
    gpu->name = json_text(from, "name", "Stand-in GPU");
    gpu->uuid = json_text(from, "uuid", "");
    gpu->pci = json_text(from, "pci", "");
    gpu->bytes = json_number(from, "bytes", 0);
    gpu->reserved_bytes = json_number(from, "reserved_bytes", 0);
    gpu->context_bytes = json_number(from, "context_bytes", 0);
    gpu->module_bytes = json_number(from, "module_bytes", 0);
    gpu->minor = (unsigned)json_number(from, "minor", index);
}

/* A driver shows a process only the GPUs whose device nodes it can open: a container has few of
 * them. */
static int can_open(const char *nodes, unsigned minor)
{
    char path[256];
    if (nodes == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/nvidia%u", nodes, minor);
    int node = open(path, O_RDWR | O_CLOEXEC);
    if (node >= 0)
        close(node);
    return node >= 0;
}

static void load(void)
{
    const char *named = getenv("PODFABRIC_STANDIN_GPUS"), *path = named ? named : NODE_OF_MACHINE;
    struct json *file = json_load(path);
    if (file == NULL)
        return;
    loaded.state = json_text(file, "state", NULL);
    loaded.driver = json_text(file, "driver", "615.20.01");
    loaded.cuda = (unsigned)json_number(file, "cuda", 13050);
    loaded.reuse_addresses = (int)json_number(file, "reuse_addresses", 0);
    loaded.reenter = (int)json_number(file, "reenter", 0);
    loaded.slice_ns = json_number(file, "slice_ns", 2000000);
    loaded.sample_ns = json_number(file, "sample_ns", 166666667);
    loaded.pool_chunk = json_number(file, "pool_chunk", 32 << 20);
    loaded.pitch = json_number(file, "pitch", 512);
    loaded.listed = json_text(file, "listed", "compute");
    loaded.nodes = json_text(file, "nodes", NULL);
    loaded.latency_ns = json_get(file, "latency_ns");
    loaded.failures = json_get(file, "failures");
    const struct json *gpus = json_get(file, "gpus");
    for (const struct json *gpu = gpus ? gpus->first : NULL; gpu != NULL; gpu = gpu->next) {
        if (loaded.gpu_count == MOST_GPUS) {
            fprintf(stderr, "stand-in: %s: more than %d GPUs\n", path, MOST_GPUS);
            abort();
        }
        load_gpu(&loaded.gpus[loaded.gpu_count], gpu, loaded.gpu_count);
        if (can_open(loaded.nodes, loaded.gpus[loaded.gpu_count].minor))
            loaded.opened[loaded.opened_count++] = loaded.gpu_count;
        loaded.gpu_count++;
    }
    if (loaded.state == NULL || loaded.slice_ns == 0 || loaded.sample_ns == 0) {
        fprintf(stderr, "stand-in: %s: state, slice_ns and sample_ns are needed\n", path);
        abort();
    }
    found = 1;
}

const struct node *node_get(void)
{
    pthread_once(&once, load);
    return found ? &loaded : NULL;
}

void node_uuid_bytes(const struct node_gpu *gpu, unsigned char bytes[16])
{
    const char *digits = strncmp(gpu->uuid, "GPU-", 4) == 0 ? gpu->uuid + 4 : gpu->uuid;
    memset(bytes, 0, 16);
    for (int nibble = 0; nibble < 32 && *digits != 0; digits++) {
        if (*digits == '-')
            continue;
        unsigned one = 0;
        sscanf((char[2]){*digits, 0}, "%1x", &one);
        bytes[nibble / 2] |= (unsigned char)(one << (nibble % 2 ? 0 : 4));
        nibble++;
    }
}
