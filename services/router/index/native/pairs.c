#include "pairs.h"

#include "table.h"

enum { SMALLEST = 8 };

static uint64_t hash_of(uint32_t first, uint64_t second)
{
    return mix_well(second ^ ((uint64_t)first * 0x9E3779B97F4A7C15ULL));
}

static PairShard *shard_of(const Pairs *pairs, uint64_t hash) { return pairs->shards + (hash >> 56); }

void pairs_init(Pairs *pairs, Memory *memory) { *pairs = (Pairs){.memory = memory}; }

void pairs_free(Pairs *pairs)
{
    if (!pairs->shards)
        return;
    for (int i = 0; i < PAIR_SHARDS; i++)
        memory_give(pairs->memory, pairs->shards[i].pairs, pairs->shards[i].capacity * sizeof(Pair));
    memory_give(pairs->memory, pairs->shards, PAIR_SHARDS * sizeof(PairShard));
    pairs_init(pairs, pairs->memory);
}

static Pair *place_of(const PairShard *shard, uint64_t hash, uint32_t first, uint64_t second)
{
    uint32_t mask = shard->capacity - 1, slot = (uint32_t)hash & mask;
    while (shard->pairs[slot].value && (shard->pairs[slot].first != first || shard->pairs[slot].second != second))
        slot = (slot + 1) & mask;
    return shard->pairs + slot;
}

uint64_t *pairs_find(const Pairs *pairs, uint32_t first, uint64_t second)
{
    if (!pairs->count)
        return NULL;
    uint64_t hash = hash_of(first, second);
    const PairShard *shard = shard_of(pairs, hash);
    if (!shard->count)
        return NULL;
    Pair *pair = place_of(shard, hash, first, second);
    return pair->value ? &pair->value : NULL;
}

static void resize(Pairs *pairs, PairShard *shard, uint32_t capacity)
{
    PairShard old = *shard;
    shard->capacity = capacity;
    shard->pairs = memory_take(pairs->memory, capacity * sizeof(Pair));
    for (uint32_t slot = 0; slot < old.capacity; slot++) {
        Pair *pair = old.pairs + slot;
        if (pair->value)
            *place_of(shard, hash_of(pair->first, pair->second), pair->first, pair->second) = *pair;
    }
    memory_give(pairs->memory, old.pairs, old.capacity * sizeof(Pair));
}

void pairs_put(Pairs *pairs, uint32_t first, uint64_t second, uint64_t value)
{
    if (!pairs->shards)
        pairs->shards = memory_take(pairs->memory, PAIR_SHARDS * sizeof(PairShard));
    uint64_t hash = hash_of(first, second);
    PairShard *shard = shard_of(pairs, hash);
    if (shard->count * 4 >= shard->capacity * 3)
        resize(pairs, shard, shard->capacity ? 2 * shard->capacity : SMALLEST);
    Pair *pair = place_of(shard, hash, first, second);
    if (!pair->value) {
        shard->count++;
        pairs->count++;
    }
    *pair = (Pair){second, value, first};
}

void pairs_remove(Pairs *pairs, uint32_t first, uint64_t second)
{
    if (!pairs_find(pairs, first, second))
        return;
    uint64_t hash = hash_of(first, second);
    PairShard *shard = shard_of(pairs, hash);
    uint32_t mask = shard->capacity - 1;
    uint32_t hole = (uint32_t)(place_of(shard, hash, first, second) - shard->pairs);
    for (uint32_t slot = (hole + 1) & mask; shard->pairs[slot].value; slot = (slot + 1) & mask) {
        uint32_t home = (uint32_t)hash_of(shard->pairs[slot].first, shard->pairs[slot].second) & mask;
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            shard->pairs[hole] = shard->pairs[slot];
            hole = slot;
        }
    }
    shard->pairs[hole] = (Pair){0, 0, 0};
    shard->count--;
    if (!--pairs->count)
        pairs_free(pairs);
    else if (shard->capacity > SMALLEST && shard->count * 8 < shard->capacity)
        resize(pairs, shard, shard->capacity / 2);
}

const Pair *pairs_next(const Pairs *pairs, uint64_t *place)
{
    if (!pairs->shards)
        return NULL;
    for (;;) {
        uint32_t number = (uint32_t)(*place >> 32), slot = (uint32_t)*place;
        if (number >= PAIR_SHARDS)
            return NULL;
        const PairShard *shard = pairs->shards + number;
        if (slot >= shard->capacity) {
            *place = (uint64_t)(number + 1) << 32;
            continue;
        }
        *place = ((uint64_t)number << 32) | (slot + 1);
        if (shard->pairs[slot].value)
            return shard->pairs + slot;
    }
}
