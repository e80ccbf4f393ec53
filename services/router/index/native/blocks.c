#include "blocks.h"

/* Chunk 0 is never used, so that 0 means no chunk and no block. */

void blocks_init(Blocks *blocks, Memory *memory) { *blocks = (Blocks){.memory = memory, .used = 1}; }

void blocks_free(Blocks *blocks)
{
    for (uint32_t number = 1; number < blocks->used; number++)
        memory_give(blocks->memory, blocks->chunks[number].rows, CHUNK_ROWS * sizeof(Block));
    memory_give(blocks->memory, blocks->chunks, blocks->capacity * sizeof(Chunk));
    blocks_init(blocks, blocks->memory);
}

static void open_chunk(Blocks *blocks, uint32_t number)
{
    Chunk *chunk = blocks->chunks + number;
    chunk->before = 0;
    chunk->after = blocks->open;
    if (blocks->open)
        blocks->chunks[blocks->open].before = number;
    blocks->open = number;
}

static void close_chunk(Blocks *blocks, uint32_t number)
{
    Chunk *chunk = blocks->chunks + number;
    if (chunk->before)
        blocks->chunks[chunk->before].after = chunk->after;
    else
        blocks->open = chunk->after;
    if (chunk->after)
        blocks->chunks[chunk->after].before = chunk->before;
}

static void make_chunk(Blocks *blocks)
{
    uint32_t number = blocks->unmade;
    if (number) {
        blocks->unmade = blocks->chunks[number].after;
    } else {
        number = blocks->used++;
        if (number >= blocks->capacity) {
            uint32_t capacity = blocks->capacity ? 2 * blocks->capacity : 16;
            blocks->chunks = memory_resize(
                blocks->memory, blocks->chunks, blocks->capacity * sizeof(Chunk), capacity * sizeof(Chunk));
            blocks->capacity = capacity;
        }
    }
    Chunk *chunk = blocks->chunks + number;
    chunk->rows = memory_take(blocks->memory, CHUNK_ROWS * sizeof(Block));
    chunk->live = 0;
    for (uint32_t row = 0; row < CHUNK_ROWS; row++)
        chunk->rows[row].parent = row + 2 <= CHUNK_ROWS ? row + 2 : 0;
    chunk->first_free = 1;
    open_chunk(blocks, number);
}

uint32_t block_take(Blocks *blocks, uint64_t hash)
{
    if (!blocks->open)
        make_chunk(blocks);
    uint32_t number = blocks->open;
    Chunk *chunk = blocks->chunks + number;
    uint32_t row = chunk->first_free - 1;
    chunk->first_free = chunk->rows[row].parent;
    chunk->live++;
    blocks->count++;
    if (!chunk->first_free)
        close_chunk(blocks, number);
    chunk->rows[row] = (Block){.hash = hash};
    return (number << CHUNK_BITS) | row;
}

void block_give(Blocks *blocks, uint32_t number)
{
    uint32_t place = number >> CHUNK_BITS, row = number & (CHUNK_ROWS - 1);
    Chunk *chunk = blocks->chunks + place;
    chunk->rows[row] = (Block){.parent = chunk->first_free};
    if (!chunk->first_free)
        open_chunk(blocks, place);
    chunk->first_free = row + 1;
    chunk->live--;
    blocks->count--;
    if (chunk->live)
        return;
    close_chunk(blocks, place);
    memory_give(blocks->memory, chunk->rows, CHUNK_ROWS * sizeof(Block));
    *chunk = (Chunk){.after = blocks->unmade};
    blocks->unmade = place;
}
