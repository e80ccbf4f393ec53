#include "block_hashes.h"

#include <string.h>

enum { AT_ONCE = 64 };

void content_hashes(const void *tokens, size_t token_count, size_t block_size, const Xxh3Seed *seed, uint64_t *hashes)
{
    const uint8_t *block = tokens;
    for (size_t i = 0; i < token_count / block_size; i++, block += 4 * block_size)
        hashes[i] = xxh3_64(seed, block, 4 * block_size);
}

void keys_extend(KeySource *source, size_t position)
{
    size_t end = position + AT_ONCE < source->count ? position + AT_ONCE : source->count;
    for (size_t i = source->ready; i < end; i++) {
        uint64_t content;
        if (source->block_size)
            content = xxh3_64(&source->seed, source->tokens + i * 4 * source->block_size, 4 * source->block_size);
        else
            memcpy(&content, source->contents + 8 * i, 8);
        uint64_t before = i ? source->keys[i - 1] : source->root;
        source->keys[i] = (before || i ? xxh3_64_pair(source->seed.seed, before, content) : content) & source->mask;
    }
    source->ready = end;
}
