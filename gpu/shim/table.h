/* The allocations of this process by address or handle: a hash table in shards with a lock each. */
#ifndef PODFABRIC_GPU_TABLE_H
#define PODFABRIC_GPU_TABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kind of the key. An address and a handle may be the same number. */
enum table_kind {
    TABLE_NONE = 0,
    TABLE_POINTER, /* of cuMemAlloc and the like; owner: the context */
    TABLE_POOLED,  /* from a pool; owner: the pool. Lookups of TABLE_POINTER find it, too */
    TABLE_HANDLE,  /* of cuMemCreate; owner: the number of its mappings */
    TABLE_MAPPING, /* by its address; owner: the handle */
    TABLE_ARRAY,   /* owner: the context */
    TABLE_POOL,    /* bytes: counted for it; owner: counted in addition for running calls */
    TABLE_CONTEXT,
    TABLE_GREEN, /* a green context */
    TABLE_GRAPH, /* bytes: the allocations of its nodes */
    TABLE_EXEC,  /* the same for an executable graph */
};

struct entry {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner;
    uint32_t references; /* of TABLE_HANDLE: releases until it is freed */
    uint8_t place;       /* enum place (devices.h) */
    uint8_t kind;        /* enum table_kind */
};

enum { SHARDS = 16 };

struct shard {
    pthread_mutex_t lock;
    struct entry *entries;
    size_t places, used, live; /* used: includes erased entries */
};

struct table {
    struct shard shard[SHARDS];
};

/* Add an entry, or replace the one with its key. False: no memory. */
bool table_put(const struct entry *entry);

/* Copy or remove an entry. False: there is none. */
bool table_get(enum table_kind kind, uint64_t key, struct entry *entry);
bool table_take(enum table_kind kind, uint64_t key, struct entry *entry);

/* Change an entry atomically; remove it if `change` sets its kind to TABLE_NONE. False: there is none, or
   `change` returned false. */
bool table_change(enum table_kind kind, uint64_t key, bool (*change)(struct entry *entry, void *with),
                  void *with);

/* Visit all entries of a kind; remove those for which `visit` returns false. It must not use the table. */
void table_visit(enum table_kind kind, bool (*visit)(struct entry *entry, void *with), void *with);

#endif
