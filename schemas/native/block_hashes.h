/* Content hashes and rolling prefix keys, straight from tokens (schemas/blocks.py). */
#ifndef KVROUTE_BLOCK_HASHES_H
#define KVROUTE_BLOCK_HASHES_H

#include <stddef.h>
#include <stdint.h>

#include "xxh3.h"

#define HASH_SEED 1337

/* Hashes of whole blocks of little-endian u32 tokens; hashes has room for token_count / block_size values. */
void content_hashes(const void *tokens, size_t token_count, size_t block_size, const Xxh3Seed *seed, uint64_t *hashes);

/* The prefix keys of a query, made as they are asked for: a query that ends early is not hashed to its end. Either
 * tokens (block_size > 0) or contents, or the keys themselves (ready == count). mask: UINT64_MAX but in tests. */
typedef struct {
    uint64_t *keys;
    size_t count, ready;
    const uint8_t *tokens;
    size_t block_size;
    const uint8_t *contents;
    uint64_t root, mask;
    Xxh3Seed seed;
} KeySource;

/* Make keys up to and with `position`, and a good number more. */
void keys_extend(KeySource *source, size_t position);

static inline uint64_t keys_at(KeySource *source, size_t position)
{
    if (position >= source->ready)
        keys_extend(source, position);
    return source->keys[position];
}

#endif
