/* The reader of tests: the ledger of a node as JSON, at one moment. tests/standin/gpus.py
 * loads it. */
#include "queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/mman.h>

#define PUBLIC __attribute__((visibility("default")))

struct oracle {
    struct ledger *ledger;
    int file;
};

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* The following functions work on the current node. */
static void enter(const struct oracle *oracle)
{
    pthread_mutex_lock(&one_at_a_time);
    ledger = oracle->ledger;
    ledger_file = oracle->file;
    ledger_lock();
}

static void leave(void)
{
    ledger_unlock();
    pthread_mutex_unlock(&one_at_a_time);
}

PUBLIC struct oracle *oracle_open(const char *path, uint64_t slice_ns, uint64_t sample_ns)
{
    struct oracle *oracle = malloc(sizeof *oracle);
    pthread_mutex_lock(&one_at_a_time);
    if (oracle == NULL || ledger_open(path, slice_ns, sample_ns) != 0)
        abort();
    *oracle = (struct oracle){ledger, ledger_file};
    pthread_mutex_unlock(&one_at_a_time);
    return oracle;
}

PUBLIC void oracle_close(struct oracle *oracle)
{
    munmap(oracle->ledger, sizeof *oracle->ledger);
    close(oracle->file);
    free(oracle);
}

static void print_use(FILE *out, const struct use *use)
{
    fprintf(out, "{\"held\":[");
    for (int kind = 0; kind < HELD_KINDS; kind++)
        fprintf(out, "%s%llu", kind ? "," : "", (unsigned long long)use->bytes[kind]);
    fprintf(out,
            "],\"peak\":%llu,\"contexts\":%llu,\"launches\":%llu,\"busy_ns\":%llu,\"backlog_ns\":%llu,"
            "\"queued\":%llu}",
            (unsigned long long)use->peak, (unsigned long long)use->contexts,
            (unsigned long long)use->launches, (unsigned long long)use->busy,
            (unsigned long long)queue_left(use, use->pushed), (unsigned long long)(use->pushed - use->finished));
}

static void print_slot(FILE *out, const struct slot *slot)
{
    const char *comma = "";
    fprintf(out, "{\"pid\":%u,\"alive\":%s,\"initialised\":%s,\"not_found\":%u,\"calls\":{",
            ledger_pid((unsigned)(slot - ledger->slots)), slot->taken ? "true" : "false", slot->initialised ? "true" : "false", slot->not_found);
    for (unsigned export = 0; export < MOST_EXPORTS; export++)
        if (slot->calls[export] != 0) {
            fprintf(out, "%s\"%u\":%u", comma, export, slot->calls[export]);
            comma = ",";
        }
    fprintf(out, "},\"gpus\":[");
    for (unsigned gpu = 0; gpu < MOST_GPUS; gpu++) {
        fprintf(out, gpu ? "," : "");
        print_use(out, &slot->gpus[gpu]);
    }
    fprintf(out, "]}");
}

/* The ledger as JSON, to be freed with oracle_free. */
PUBLIC char *oracle_read(const struct oracle *oracle)
{
    char *text = NULL;
    size_t length;
    FILE *out = open_memstream(&text, &length);
    if (out == NULL)
        abort();
    enter(oracle);
    ledger_reap();
    fprintf(out, "{\"gpus\":[");
    for (unsigned gpu = 0; gpu < MOST_GPUS; gpu++) {
        queue_advance(gpu);
        fprintf(out, "%s{\"resident\":%llu,\"peak\":%llu,\"time_ns\":%llu}", gpu ? "," : "",
                (unsigned long long)ledger_resident(gpu),
                (unsigned long long)ledger->engines[gpu].peak,
                (unsigned long long)ledger->engines[gpu].time);
    }
    fprintf(out, "],\"processes\":[");
    for (unsigned slot = 0; slot < ledger->slots_used; slot++) {
        fprintf(out, slot ? "," : "");
        print_slot(out, &ledger->slots[slot]);
    }
    fprintf(out, "]}");
    leave();
    fclose(out);
    return text;
}

PUBLIC void oracle_free(char *text)
{
    free(text);
}
