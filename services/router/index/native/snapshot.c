#include "snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "../../../../schemas/native/xxh3.h"

#define MAGIC 0x5845444E4952564BULL /* KVRINDEX */
enum { VERSION = 1, CHECK_SEED = 1337 };

static void put(Bytes *bytes, const void *data, size_t size)
{
    if (bytes->length + size > bytes->capacity) {
        bytes->capacity = (bytes->length + size) * 2 + 4096;
        bytes->data = realloc(bytes->data, bytes->capacity);
        if (!bytes->data)
            abort();
    }
    if (size)
        memcpy(bytes->data + bytes->length, data, size);
    bytes->length += size;
}

static void put64(Bytes *bytes, uint64_t value) { put(bytes, &value, 8); }

static void put32(Bytes *bytes, uint32_t first, uint32_t second)
{
    put(bytes, &first, 4);
    put(bytes, &second, 4);
}

static void put_member(const Index *index, Bytes *bytes, uint32_t member)
{
    put32(bytes, index->holders[slot_of(member)].holder, tier_of(member));
}

static uint64_t key_of(const Index *index, uint32_t block) { return unmix(block_at(&index->blocks, block)->hash); }

/* Where holders claim; a place for the count is left and filled at the end, as with sets. */
static void put_shelves(const Index *index, Bytes *bytes)
{
    size_t place = bytes->length;
    uint64_t count = 0;
    put64(bytes, 0);
    for (uint32_t slot = 0; slot < index->holders_used; slot++)
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (index->holders[slot].used && index->holders[slot].claims[tier]) {
                put_member(index, bytes, member_of(slot, tier));
                put64(bytes, index->holders[slot].domain[tier]->number);
                count++;
            }
    memcpy(bytes->data + place, &count, 8);
}

/* Each set once, numbered in order of first use. */
static void put_sets(const Index *index, Bytes *bytes, Pairs *numbers)
{
    size_t place = bytes->length;
    put64(bytes, 0);
    Cursor cursor = {0, 0};
    for (const Entry *entry; (entry = table_next(&index->names, &cursor));) {
        if (pairs_find(numbers, 0, entry->set))
            continue;
        pairs_put(numbers, 0, entry->set, numbers->count + 1);
        uint32_t size = set_count(&index->sets, entry->set);
        put64(bytes, size);
        for (uint32_t position = 0; position < size; position++)
            put_member(index, bytes, set_member(&index->sets, entry->set, position));
    }
    memcpy(bytes->data + place, &numbers->count, 8);
}

static void put_names(const Index *index, Bytes *bytes, const Pairs *numbers)
{
    put64(bytes, index->names.count);
    Cursor cursor = {0, 0};
    for (const Entry *entry; (entry = table_next(&index->names, &cursor));) {
        put64(bytes, unmix(entry->hash));
        put64(bytes, key_of(index, entry->id));
        put64(bytes, *pairs_find(numbers, 0, entry->set));
    }
    put64(bytes, index->meanings.count);
    uint64_t place = 0;
    for (const Pair *pair; (pair = pairs_next(&index->meanings, &place));) {
        put64(bytes, pair->first);
        put64(bytes, pair->second);
        put64(bytes, key_of(index, (uint32_t)pair->value));
    }
}

static void put_blocks(const Index *index, Bytes *bytes)
{
    put64(bytes, index->keys.count);
    Cursor cursor = {0, 0};
    for (const Entry *entry; (entry = table_next(&index->keys, &cursor));) {
        const Block *block = block_at(&index->blocks, entry->id);
        put64(bytes, unmix(block->hash));
        put64(bytes, block->parent ? key_of(index, block->parent) : 0);
        put32(bytes, block->parent != 0, block->tick);
    }
}

static void put_chains(const Index *index, Bytes *bytes)
{
    uint64_t count = 0;
    for (const Link *link = index->room.by_age.first; link; link = link->after)
        count++;
    put64(bytes, count);
    for (const Link *link = index->room.by_age.first; link; link = link->after) {
        const Chain *chain = link->chain;
        put_member(index, bytes, member_of(chain->slot, chain->tier));
        put32(bytes, chain->domain, chain->parent_domain);
        put32(bytes, chain->counted, chain->count);
        put64(bytes, chain->parent);
        put(bytes, chain->names, 8 * (size_t)chain->count);
        put(bytes, chain->contents, 8 * (size_t)chain->count);
        put(bytes, chain->gone, chain->count);
        put(bytes, "\0\0\0\0\0\0\0", -chain->count & 7);
    }
}

void snapshot(const Index *index, Bytes *bytes)
{
    Memory memory = {0};
    Pairs numbers;
    pairs_init(&numbers, &memory);
    put64(bytes, MAGIC);
    put64(bytes, VERSION);
    put64(bytes, index->counters.evicted);
    put64(bytes, index->counters.unknown_names);
    put64(bytes, index->counters.unknown_removals);
    put64(bytes, index->counters.renamed);
    put_blocks(index, bytes);
    put_shelves(index, bytes);
    put_sets(index, bytes, &numbers);
    put_names(index, bytes, &numbers);
    pairs_free(&numbers);
    put64(bytes, index->repeats.count);
    uint64_t place = 0;
    for (const Pair *pair; (pair = pairs_next(&index->repeats, &place));) {
        put_member(index, bytes, pair->first);
        put64(bytes, pair->second);
        put64(bytes, pair->value);
    }
    put_chains(index, bytes);
    Xxh3Seed seed;
    xxh3_seed(&seed, CHECK_SEED);
    put64(bytes, xxh3_64(&seed, bytes->data, bytes->length));
}
