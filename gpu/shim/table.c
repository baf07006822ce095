/* The hash table of this process' allocations: each shard uses open addressing (table.h). */
#include "table.h"

#include <stdlib.h>

#include "process.h"

enum { FIRST_PLACES = 64 };
enum { GONE = 255 }; /* the kind of an erased entry; lookups skip it */

static uint64_t hash(enum table_kind kind, uint64_t key)
{
    uint64_t value = key ^ (uint64_t)kind << 56;

    value ^= value >> 32;
    value *= UINT64_C(0xd6e8feb86659fd93);
    value ^= value >> 32;
    value *= UINT64_C(0xd6e8feb86659fd93);
    return value ^ value >> 32;
}

/* Pointers of a pool are in the space of plain pointers: cuMemFree frees both. */
static enum table_kind space(enum table_kind kind)
{
    return kind == TABLE_POOLED ? TABLE_POINTER : kind;
}

static struct shard *shard_of(uint64_t hashed)
{
    return &process->table.shard[hashed % SHARDS];
}

/* The first place of an entry. The number of places grows by half, so it is not a power of two. */
static size_t home(const struct shard *shard, uint64_t hashed)
{
    return (size_t)(((unsigned __int128)hashed * shard->places) >> 64);
}

static struct entry *find(const struct shard *shard, uint64_t hashed, enum table_kind kind, uint64_t key)
{
    if (shard->places == 0)
        return NULL;
    for (size_t i = home(shard, hashed);; i = i + 1 == shard->places ? 0 : i + 1) {
        struct entry *entry = &shard->entries[i];

        if (entry->kind == TABLE_NONE)
            return NULL;
        if (entry->key == key && space(entry->kind) == kind)
            return entry;
    }
}

/* The key must not be in the table. */
static void insert(struct shard *shard, const struct entry *entry)
{
    size_t i = home(shard, hash(space(entry->kind), entry->key));

    while (shard->entries[i].kind != TABLE_NONE && shard->entries[i].kind != GONE)
        i = i + 1 == shard->places ? 0 : i + 1;
    shard->used += shard->entries[i].kind == TABLE_NONE;
    shard->entries[i] = *entry;
    shard->live++;
}

static bool resize(struct shard *shard)
{
    size_t places = FIRST_PLACES, old_places = shard->places;

    while ((shard->live + 1) * 100 > places * 60)
        places += places / 2;
    struct entry *entries = calloc(places, sizeof *entries), *old = shard->entries;

    if (!entries)
        return false;
    shard->entries = entries;
    shard->places = places;
    shard->used = shard->live = 0;
    for (size_t i = 0; i < old_places; i++)
        if (old[i].kind != TABLE_NONE && old[i].kind != GONE)
            insert(shard, &old[i]);
    free(old);
    return true;
}

static void erase(struct shard *shard, struct entry *entry)
{
    entry->kind = GONE;
    shard->live--;
}

bool table_put(const struct entry *entry)
{
    uint64_t hashed = hash(space(entry->kind), entry->key);
    struct shard *shard = shard_of(hashed);
    bool done = true;

    pthread_mutex_lock(&shard->lock);
    struct entry *old = find(shard, hashed, space(entry->kind), entry->key);

    if (old)
        *old = *entry;
    else if ((shard->used + 1) * 100 <= shard->places * 85 || resize(shard))
        insert(shard, entry);
    else
        done = false;
    pthread_mutex_unlock(&shard->lock);
    return done;
}

bool table_change(enum table_kind kind, uint64_t key, bool (*change)(struct entry *entry, void *with),
                  void *with)
{
    uint64_t hashed = hash(kind, key);
    struct shard *shard = shard_of(hashed);

    pthread_mutex_lock(&shard->lock);
    struct entry *entry = find(shard, hashed, kind, key);
    bool done = entry && change(entry, with);

    if (entry && entry->kind == TABLE_NONE)
        erase(shard, entry);
    pthread_mutex_unlock(&shard->lock);
    return done;
}

static bool copy(struct entry *entry, void *to)
{
    *(struct entry *)to = *entry;
    return true;
}

static bool move(struct entry *entry, void *to)
{
    *(struct entry *)to = *entry;
    entry->kind = TABLE_NONE;
    return true;
}

bool table_get(enum table_kind kind, uint64_t key, struct entry *entry)
{
    return table_change(kind, key, copy, entry);
}

bool table_take(enum table_kind kind, uint64_t key, struct entry *entry)
{
    return table_change(kind, key, move, entry);
}

void table_visit(enum table_kind kind, bool (*visit)(struct entry *entry, void *with), void *with)
{
    for (size_t s = 0; s < SHARDS; s++) {
        struct shard *shard = &process->table.shard[s];

        pthread_mutex_lock(&shard->lock);
        for (size_t i = 0; i < shard->places; i++)
            if (shard->entries[i].kind == kind && !visit(&shard->entries[i], with))
                erase(shard, &shard->entries[i]);
        pthread_mutex_unlock(&shard->lock);
    }
}
