#include <stdlib.h>
#include <string.h>

#include "../../../../schemas/native/xxh3.h"
#include "snapshot.h"

#define MAGIC 0x5845444E4952564BULL /* KVRINDEX */
enum { VERSION = 1, CHECK_SEED = 1337, RECORD = 24 };
/* A prime. */
#define LEAP 2654435761ULL

/* failed: set by a read beyond the end, which gives zeros. */
typedef struct {
    const uint8_t *data;
    size_t length, at;
    bool failed;
} Reader;

static const uint8_t *get(Reader *reader, uint64_t size)
{
    if (reader->failed || size > reader->length - reader->at) {
        reader->failed = true;
        return NULL;
    }
    const uint8_t *at = reader->data + reader->at;
    reader->at += size;
    return at;
}

static uint64_t get64(Reader *reader)
{
    uint64_t value = 0;
    const uint8_t *at = get(reader, 8);
    if (at)
        memcpy(&value, at, 8);
    return value;
}

static uint32_t get32(Reader *reader)
{
    uint32_t value = 0;
    const uint8_t *at = get(reader, 4);
    if (at)
        memcpy(&value, at, 4);
    return value;
}

/* How many items of at least this size follow; a larger count than the rest can hold is damage. */
static uint64_t get_count(Reader *reader, size_t size)
{
    uint64_t count = get64(reader);
    if (count > (reader->length - reader->at) / size)
        reader->failed = true;
    return reader->failed ? 0 : count;
}

static bool get_member(Reader *reader, uint32_t *holder, uint32_t *tier)
{
    *holder = get32(reader);
    *tier = get32(reader);
    reader->failed = reader->failed || *holder > INT32_MAX || *tier >= TIERS;
    return !reader->failed;
}

/* Record i of `count`, each once but in leaps: snapshots are in the order of hashes, and a table that is filled in that
 * order has all its entries in one corner. */
static Reader record_at(const Reader *reader, size_t start, uint64_t i, uint64_t count)
{
    uint64_t place = count % LEAP ? i * LEAP % count : i;
    return (Reader){reader->data, reader->length, start + place * RECORD, false};
}

/* The blocks with what they follow; each is pinned until everything is read. */
static void get_blocks(Index *index, Reader *reader, uint64_t count)
{
    size_t start = reader->at;
    for (uint64_t i = 0; i < count && !reader->failed; i++) {
        Reader record = record_at(reader, start, i, count);
        uint64_t key = get64(&record);
        get(&record, 12);
        uint32_t tick = get32(&record);
        if (table_find(&index->keys, mix(key))) {
            reader->failed = true;
            return;
        }
        uint32_t block = block_take(&index->blocks, mix(key));
        table_insert(&index->keys, mix(key), block, 0);
        block_at(&index->blocks, block)->tick = tick;
        block_pin(index, block);
        if ((int32_t)(tick - index->calls) > 0)
            index->calls = tick;
    }
    reader->at = start;
    for (uint64_t i = 0; i < count && !reader->failed; i++) {
        uint32_t block = block_of_key(index, get64(reader)), parent = block_of_key(index, get64(reader));
        if (get32(reader) && parent && parent != block) {
            block_at(&index->blocks, block)->parent = parent;
            block_at(&index->blocks, parent)->children++;
        }
        get32(reader);
    }
}

static void unpin_blocks(Index *index, Reader reader, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        block_unpin(index, block_of_key(index, get64(&reader)));
        get(&reader, 16);
    }
}

/* A (holder, tier) with the domain of its claims, kept open while the claims are read. */
typedef struct {
    uint32_t slot;
    Domain *domain;
} Shelf;

static void get_shelves(Index *index, Reader *reader, Shelf *shelves, uint64_t count, uint64_t *opened)
{
    for (*opened = 0; *opened < count; ++*opened) {
        uint32_t holder, tier;
        bool fine = get_member(reader, &holder, &tier);
        uint64_t domain = get64(reader);
        uint32_t slot = fine ? holder_slot(index, holder) : 0;
        if (!fine || domain > INT32_MAX || index->holders[slot].domain[tier]) {
            reader->failed = true;
            return;
        }
        index->holders[slot].busy++;
        shelves[*opened] = (Shelf){slot, domain_open(index, slot, tier, (uint32_t)domain)};
    }
}

static void close_shelves(Index *index, const Shelf *shelves, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        domain_close(index, shelves[i].domain);
        index->holders[shelves[i].slot].busy--;
        holder_release_if_idle(index, shelves[i].slot);
    }
}

static void get_names(Index *index, Reader *reader, const size_t *sets, uint64_t set_number)
{
    Attaching attaching = {{NULL, NULL}, {0, 0, 0, 0, 0}};
    uint64_t count = get_count(reader, RECORD);
    size_t start = reader->at;
    get(reader, count * RECORD);
    for (uint64_t i = 0; i < count; i++) {
        Reader record = record_at(reader, start, i, count);
        uint64_t name = get64(&record), key = get64(&record), set = get64(&record);
        if (!set || set > set_number) {
            reader->failed = true;
            return;
        }
        Reader members = {reader->data, reader->length, sets[set - 1], false};
        for (uint64_t left = get_count(&members, 8); left; left--) {
            uint32_t holder, tier, slot;
            if (!get_member(&members, &holder, &tier) || !holder_find(index, holder, &slot)
                || !index->holders[slot].domain[tier]) {
                reader->failed = true;
                return;
            }
            claim(index, slot, tier, name, key, false, 0, &attaching);
        }
    }
}

static void get_meanings(Index *index, Reader *reader)
{
    for (uint64_t count = get_count(reader, 24); count; count--) {
        uint64_t number = get64(reader), name = get64(reader), key = get64(reader);
        const Domain *domain = number <= INT32_MAX ? domain_find(index, (uint32_t)number) : NULL;
        if (reader->failed || !domain || !name_meaning(index, domain, name))
            continue;
        uint32_t block = block_of_key(index, key);
        if (!block) {
            block = block_take(&index->blocks, mix(key));
            table_insert(&index->keys, mix(key), block, 0);
        }
        block_pin(index, block);
        change_meaning(index, domain, name, block);
        block_unpin(index, block);
    }
}

static void get_repeats(Index *index, Reader *reader)
{
    for (uint64_t count = get_count(reader, 24); count; count--) {
        uint32_t holder, tier, slot;
        bool fine = get_member(reader, &holder, &tier);
        uint64_t name = get64(reader), stores = get64(reader);
        if (!fine)
            return;
        if (stores && holder_find(index, holder, &slot) && index->holders[slot].claims[tier]
            && name_claimed(index, name, member_of(slot, tier)))
            pairs_put(&index->repeats, member_of(slot, tier), name, stores);
    }
}

static void get_chains(Index *index, Reader *reader)
{
    for (uint64_t count = get_count(reader, 32); count && !reader->failed; count--) {
        Origin origin;
        if (!get_member(reader, &origin.holder, &origin.tier))
            return;
        origin.domain = get32(reader);
        origin.parent_domain = get32(reader);
        origin.counted = get32(reader);
        uint32_t blocks = get32(reader);
        uint64_t parent = get64(reader);
        const uint8_t *names = get(reader, 8 * (uint64_t)blocks), *contents = get(reader, 8 * (uint64_t)blocks);
        const uint8_t *gone = get(reader, ((uint64_t)blocks + 7) & ~7ULL);
        if (reader->failed || (uintptr_t)names % 8 || !blocks) {
            reader->failed = true;
            return;
        }
        bool fits;
        waiting_add(index, &origin, (const uint64_t *)(const void *)names, (const uint64_t *)(const void *)contents,
                    blocks, parent, &fits);
        uint32_t slot;
        if (!fits || !holder_find(index, origin.holder, &slot))
            continue;
        Chain *chain = index->room.by_age.last->chain;
        waiting_mark_gone(index, chain, gone);
    }
}

const char *restore(Index *index, const uint8_t *data, size_t length)
{
    if (index->claims || index->room.blocks || index->blocks.count)
        return "the index is not empty";
    if ((uintptr_t)data % 8)
        return "the snapshot must be aligned to 8 bytes";
    Reader reader = {data, length < 8 ? 0 : length - 8, 0, false};
    if (get64(&reader) != MAGIC)
        return "this is not an index snapshot";
    uint64_t version = get64(&reader), check;
    if (reader.failed || version != VERSION)
        return "the snapshot has another version than 1";
    Xxh3Seed seed;
    xxh3_seed(&seed, CHECK_SEED);
    memcpy(&check, data + length - 8, 8);
    if (xxh3_64(&seed, data, length - 8) != check)
        return "the snapshot is damaged: its checksum does not agree";
    Counters counters;
    counters.evicted = get64(&reader);
    counters.unknown_names = get64(&reader);
    counters.unknown_removals = get64(&reader);
    counters.renamed = get64(&reader);
    uint64_t blocks = get_count(&reader, 24);
    Reader block_reader = reader;
    get_blocks(index, &reader, blocks);
    uint64_t shelf_number = get_count(&reader, 16), opened;
    Shelf *shelves = malloc(shelf_number * sizeof(Shelf) + 1);
    if (!shelves)
        abort();
    get_shelves(index, &reader, shelves, shelf_number, &opened);
    uint64_t set_number = get_count(&reader, 8);
    size_t *sets = malloc(set_number * sizeof(size_t) + 1);
    if (!sets)
        abort();
    for (uint64_t i = 0; i < set_number; i++) {
        sets[i] = reader.at;
        get(&reader, get_count(&reader, 8) * 8);
    }
    get_names(index, &reader, sets, set_number);
    get_meanings(index, &reader);
    close_shelves(index, shelves, opened);
    free(sets);
    free(shelves);
    get_repeats(index, &reader);
    get_chains(index, &reader);
    if (reader.failed || reader.at != reader.length) {
        uint64_t max_blocks = index->max_blocks, max_waiting = index->room.max_blocks;
        uint32_t bits = index->key_mask == UINT64_MAX ? 64 : (uint32_t)__builtin_popcountll(index->key_mask);
        index_free(index);
        index_init(index, max_blocks, max_waiting, bits);
        return "the snapshot is damaged: its parts do not agree";
    }
    unpin_blocks(index, block_reader, blocks);
    index->counters = counters;
    return NULL;
}
