/* The records of blocks: stable numbers, so that names can refer to them in four bytes.
 *
 * A block is one prefix key. Who holds it stands in the key table (see core.h), because queries need only that.
 */
#ifndef KVROUTE_BLOCKS_H
#define KVROUTE_BLOCKS_H

#include "memory.h"

enum { CHUNK_BITS = 10, CHUNK_ROWS = 1 << CHUNK_BITS };

/* hash: mix(prefix key). references: names that lead here, and calls at work. parent: 0 if unknown; a block stays as
 * long as it has children, also when nobody holds it. tick: when it was last stored. */
typedef struct {
    uint64_t hash;
    uint32_t references;
    uint32_t parent;
    uint32_t children;
    uint32_t tick;
} Block;

/* first_free: row + 1 of the first free row, linked through `parent`. before, after: other chunks with free rows. */
typedef struct {
    Block *rows;
    uint32_t live, first_free;
    uint32_t before, after;
} Chunk;

typedef struct {
    Memory *memory;
    Chunk *chunks;
    uint32_t capacity, used;
    uint32_t open;   /* a chunk with free rows, or 0 */
    uint32_t unmade; /* a chunk number without rows, linked through `after`, or 0 */
    uint64_t count;
} Blocks;

void blocks_init(Blocks *blocks, Memory *memory);
void blocks_free(Blocks *blocks);
uint32_t block_take(Blocks *blocks, uint64_t hash);
void block_give(Blocks *blocks, uint32_t number);

static inline Block *block_at(const Blocks *blocks, uint32_t number)
{
    return blocks->chunks[number >> CHUNK_BITS].rows + (number & (CHUNK_ROWS - 1));
}

#endif
