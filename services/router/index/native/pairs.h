/* A map from (u32, u64) to a word, for what is rare: repeated stores, copies, waiting blocks; and for small catalogues. */
#ifndef KVROUTE_PAIRS_H
#define KVROUTE_PAIRS_H

#include <stdbool.h>

#include "memory.h"

enum { PAIR_SHARDS = 256 };

/* value: never 0. */
typedef struct {
    uint64_t second;
    uint64_t value;
    uint32_t first;
} Pair;

typedef struct {
    Pair *pairs;
    uint32_t capacity;
    uint32_t count;
} PairShard;

/* Shards double one at a time, so that no step copies much. */
typedef struct {
    Memory *memory;
    PairShard *shards;
    uint64_t count;
} Pairs;

void pairs_init(Pairs *pairs, Memory *memory);
void pairs_free(Pairs *pairs);
/* The place of a value, NULL where there is none; void after the next change. */
uint64_t *pairs_find(const Pairs *pairs, uint32_t first, uint64_t second);
void pairs_put(Pairs *pairs, uint32_t first, uint64_t second, uint64_t value);
void pairs_remove(Pairs *pairs, uint32_t first, uint64_t second);
/* The next pair of a walk from *place 0 on, NULL at the end. */
const Pair *pairs_next(const Pairs *pairs, uint64_t *place);

#endif
