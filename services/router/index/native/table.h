/* A map from 64-bit hashes to two words: open addressing in small segments.
 *
 * A segment keeps its entries in the order of their hashes (linear probing from a home position that rises with the
 * hash), so a look-up of something absent ends early and a removal closes its gap: no tombstones, no decay. A segment
 * grows by an eighth and splits in two when it is large; the directory finds it by the upper bits of the hash. No step
 * touches more than one segment, so growth never pauses. Several entries may have the same hash.
 */
#ifndef KVROUTE_TABLE_H
#define KVROUTE_TABLE_H

#include <stdbool.h>

#include "memory.h"

/* id: 0 where the slot is free. What id and set mean is the owner's business. */
typedef struct {
    uint64_t hash;
    uint32_t id;
    uint32_t set;
} Entry;

/* Slots 0..length-1 hold entries, those behind are always free. depth: bits of the directory that lead here. */
typedef struct {
    Entry *slots;
    uint32_t capacity;
    uint32_t length;
    uint32_t count;
    uint32_t depth;
} Segment;

typedef struct {
    Memory *memory;
    Segment **directory;
    uint32_t depth;
    uint64_t count;
} Table;

void table_init(Table *table, Memory *memory);
void table_free(Table *table);

/* Slots that are looked at together; a segment has as many free ones at its end. */
enum { TOGETHER = 4 };

/* A position that a walk can be resumed at; changes in between may make it see entries twice or not at all. */
typedef struct {
    uint64_t segment;
    uint32_t slot;
} Cursor;

/* The next entry of a walk in the order of hashes, NULL at the end. */
Entry *table_next(const Table *table, Cursor *cursor);
/* Let a walk see again what has moved into the slot of the entry that was just removed. */
void table_stay(Cursor *cursor);

/* The new entry, before others with the same hash or after them; pointers to entries are void afterwards. */
Entry *table_insert(Table *table, uint64_t hash, uint32_t id, uint32_t set);
void table_remove(Table *table, Entry *entry);

Entry *table_find_slowly(Entry *entry, uint64_t hash);

static inline uint32_t table_slot_of(const Segment *segment, uint64_t hash)
{
    uint32_t place = (uint32_t)((hash << segment->depth) >> 32);
    return (uint32_t)(((uint64_t)place * segment->capacity) >> 32);
}

static inline Segment *table_segment(const Table *table, uint64_t hash)
{
    return table->directory[table->depth ? hash >> (64 - table->depth) : 0];
}

/* The first entry with this hash at or behind `entry`, NULL if there is none. Four slots are looked at in one step:
 * where in them the entry is cannot be predicted, so there must be no branch for it. */
static inline Entry *table_find_from(Entry *entry, uint64_t hash)
{
    for (;; entry += TOGETHER) {
        unsigned same = (unsigned)(entry[0].hash == hash) | (unsigned)(entry[1].hash == hash) << 1
                        | (unsigned)(entry[2].hash == hash) << 2 | (unsigned)(entry[3].hash == hash) << 3;
        if (__builtin_expect(same != 0, 1)) {
            Entry *found = entry + __builtin_ctz(same);
            if (__builtin_expect(found->id != 0, 1))
                return found;
        }
        /* A free slot, or a larger hash: what is sought would stand before it. The hash 0 may look like a free slot. */
        for (int i = 0; i < TOGETHER; i += TOGETHER - 1)
            if (!entry[i].id || entry[i].hash > hash)
                return hash ? NULL : table_find_slowly(entry, hash);
    }
}

static inline Entry *table_home(const Table *table, uint64_t hash)
{
    const Segment *segment = table_segment(table, hash);
    return segment->slots + table_slot_of(segment, hash);
}

/* The first entry with this hash, NULL if there is none. */
static inline Entry *table_find(const Table *table, uint64_t hash)
{
    return table->count ? table_find_from(table_home(table, hash), hash) : NULL;
}

/* The next entry with the same hash, NULL if there is none. */
static inline Entry *table_next_same(Entry *entry)
{
    return entry[1].id && entry[1].hash == entry->hash ? entry + 1 : NULL;
}

static inline void table_prefetch(const Table *table, uint64_t hash)
{
    if (!table->count)
        return;
    const Entry *home = table_home(table, hash);
    __builtin_prefetch(home);
    __builtin_prefetch(home + TOGETHER - 1);
}

/* One-to-one, and even numbers in a row are spread over the upper bits, which tables go by. */
static inline uint64_t mix(uint64_t value) { return value * 0x9E3779B97F4A7C15ULL; }
static inline uint64_t unmix(uint64_t value) { return value * 0xF1DE83E19937733DULL; }

/* Every bit of the result depends on every bit of the value. */
static inline uint64_t mix_well(uint64_t value)
{
    value ^= value >> 32;
    value *= 0xD6E8FEB86659FD93ULL;
    value ^= value >> 32;
    value *= 0xD6E8FEB86659FD93ULL;
    return value ^ (value >> 32);
}

#endif
