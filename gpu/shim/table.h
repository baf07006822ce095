/*
 * What this process has allocated, by its address or handle: a hash table in shards with a lock each.
 * 32 bytes for each entry, at most 85 of 100 places used; finding one takes the same time whether
 * there are ten or a million.
 */
#ifndef PODFABRIC_GPU_TABLE_H
#define PODFABRIC_GPU_TABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the key is. An address and a handle may be the same number. */
enum table_kind {
    TABLE_NONE = 0,
    TABLE_POINTER, /* of cuMemAlloc and the like; owner: the context */
    TABLE_POOLED,  /* allocated from a pool; owner: the pool. Found as TABLE_POINTER, too */
    TABLE_HANDLE,  /* of cuMemCreate; owner: how many mappings it has */
    TABLE_MAPPING, /* by its address; owner: the handle */
    TABLE_ARRAY,   /* owner: the context */
    TABLE_POOL,    /* bytes: what is counted for it; owner: beside that, for calls that are not done */
    TABLE_CONTEXT,
    TABLE_GREEN, /* a green context */
    TABLE_GRAPH, /* bytes: what its nodes ask for */
    TABLE_EXEC,  /* the same of an instantiated one */
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
    size_t places, used, live; /* used: also by entries that are gone */
};

struct table {
    struct shard shard[SHARDS];
};

/* Add, or replace the entry of the same key. False: no memory. */
bool table_put(const struct entry *entry);

/* Copy an entry. False: there is none. */
bool table_get(enum table_kind kind, uint64_t key, struct entry *entry);

/* Take an entry out. False: there is none. */
bool table_take(enum table_kind kind, uint64_t key, struct entry *entry);

/* Change an entry where it is, in a way that is atomic for other callers. False: there is none, or
   `change` said so. It may set `kind` to TABLE_NONE, and then the entry goes. */
bool table_change(enum table_kind kind, uint64_t key, bool (*change)(struct entry *entry, void *with),
                  void *with);

/* Call `visit` for all entries of a kind, in no order; those for which it is false go. It must not
   use the table. */
void table_visit(enum table_kind kind, bool (*visit)(struct entry *entry, void *with), void *with);

#endif
