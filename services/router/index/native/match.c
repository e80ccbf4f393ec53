#include "match.h"

#include <stdlib.h>
#include <string.h>

enum { AHEAD = 16 };

/* A query at work. alive: bits of slots; depths: per slot; sets: who holds each block, as far
 * as it was looked up (known). Stamps by slot tell what a set contains, per kind. */
typedef struct {
    const Index *index;
    KeySource *keys;
    const Candidates *candidates;
    Coverage *coverages;
    Scratch *scratch;
    const uint32_t *slots, *local_slots;
    uint32_t *sets, *open;
    uint64_t *alive;
    uint32_t *depths, *cpu, *disk, *pool;
    size_t known;
    uint32_t in_pools;
} Query;

void scratch_free(Scratch *scratch)
{
    free(scratch->words);
    free(scratch->stamps);
    *scratch = (Scratch){0};
}

static void *or_end(void *at)
{
    if (!at)
        abort();
    return at;
}

static void prepare(Query *query)
{
    Scratch *scratch = query->scratch;
    const Candidates *candidates = query->candidates;
    size_t holders = query->index->holders_used, blocks = query->keys->count;
    size_t alive_words = 2 * (holders / 64 + 1);
    size_t words = alive_words + (size_t)candidates->count + blocks + 1;
    if (words > scratch->capacity) {
        free(scratch->words);
        scratch->capacity = words + words / 2;
        scratch->words = or_end(malloc(scratch->capacity * sizeof(uint32_t)));
    }
    if (4 * holders > scratch->stamp_capacity || scratch->stamp > UINT32_MAX / 2) {
        free(scratch->stamps);
        scratch->stamp_capacity = 4 * (holders + holders / 2 + 16);
        scratch->stamps = or_end(calloc(scratch->stamp_capacity, sizeof(uint32_t)));
        scratch->stamp = 0;
    }
    query->alive = (uint64_t *)(void *)scratch->words;
    memset(query->alive, 0, alive_words * sizeof(uint32_t));
    query->open = scratch->words + alive_words;
    query->sets = query->open + candidates->count;
    query->slots = candidates->slots;
    query->local_slots = candidates->local_slots;
    size_t each = scratch->stamp_capacity / 4;
    query->depths = scratch->stamps;
    query->cpu = query->depths + each;
    query->disk = query->cpu + each;
    query->pool = query->disk + each;
}

static void resolve(const Index *index, const uint32_t *holders, uint32_t *slots, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!holder_find(index, holders[i], slots + i))
            slots[i] = NOBODY;
}

void candidates_resolve(Candidates *candidates, const Index *index)
{
    resolve(index, candidates->holders, candidates->slots, candidates->count);
    resolve(index, candidates->locals, candidates->local_slots, candidates->local_count);
    resolve(index, candidates->pools, candidates->pool_slots, candidates->pool_count);
    __atomic_store_n(&candidates->version, index->slots_version, __ATOMIC_RELEASE);
}

/* Look up the next blocks together, so that their memory is waited for once. */
static void look_up(Query *query)
{
    const Table *table = &query->index->keys;
    size_t count = query->keys->count - query->known;
    count = count < AHEAD ? count : AHEAD;
    keys_at(query->keys, query->known + count - 1);
    const uint64_t *keys = query->keys->keys + query->known;
    uint64_t hashes[AHEAD];
    Entry *homes[AHEAD];
    for (size_t i = 0; i < count; i++) {
        hashes[i] = mix(keys[i]);
        homes[i] = table_home(table, hashes[i]);
        __builtin_prefetch(homes[i]);
        __builtin_prefetch(homes[i] + TOGETHER - 1);
    }
    for (size_t i = 0; i < count; i++) {
        const Entry *entry = table_find_from(homes[i], hashes[i]);
        query->sets[query->known + i] = entry ? entry->set : 0;
    }
    query->known += count;
}

static uint32_t set_at(Query *query, size_t position)
{
    while (query->known <= position)
        look_up(query);
    return query->sets[position];
}

static void stamp_members(Query *query, uint32_t set)
{
    const Sets *sets = &query->index->sets;
    uint32_t stamp = ++query->scratch->stamp;
    for (uint32_t i = 0, count = set_count(sets, set); i < count; i++) {
        uint32_t member = set_member(sets, set, i), tier = tier_of(member);
        if (tier != NPU)
            (tier == CPU ? query->cpu : query->disk)[slot_of(member)] = stamp;
    }
}

/* Let go of the workers in one word of slots that do not have block `position`; how many. */
static uint32_t keep_alive(Query *query, size_t word, uint64_t holders, size_t position)
{
    uint64_t dead = query->alive[word] & ~holders;
    uint32_t count = 0;
    query->alive[word] &= holders;
    for (; dead; dead &= dead - 1, count++)
        query->depths[64 * word + (size_t)__builtin_ctzll(dead)] = (uint32_t)position;
    return count;
}

/* The words of a small set's bitmap, which it does not keep. */
static uint64_t word_of(const Sets *sets, uint32_t set, size_t word)
{
    uint64_t bits = 0;
    for (uint32_t i = 0, count = set_count(sets, set); i < count; i++) {
        uint32_t member = set_member(sets, set, i);
        if (tier_of(member) == NPU && member / 64 == word)
            bits |= 1ULL << (member % 64);
    }
    return bits;
}

/* The same for all slots. */
static uint32_t keep_holders(Query *query, uint32_t set, size_t words, size_t position)
{
    const Sets *sets = &query->index->sets;
    const SetRow *row = set && !(set & SINGLE) ? sets->rows[set] : NULL;
    uint32_t gone = 0;
    for (size_t word = 0; word < words; word++) {
        if (!query->alive[word])
            continue;
        uint64_t holders = row && row->words ? (word < row->words ? set_bitmap(row)[word] : 0) : word_of(sets, set, word);
        gone += keep_alive(query, word, holders, position);
    }
    return gone;
}

/* The contiguous prefix that each candidate has in its NPU. */
static void find_depths(Query *query)
{
    const Index *index = query->index;
    uint32_t count = query->candidates->count, living = 0, before = 0;
    size_t words = index->holders_used / 64 + 1;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = query->slots[i];
        if (slot == NOBODY || !index->holders[slot].blocks[NPU])
            continue;
        query->alive[slot / 64] |= 1ULL << (slot % 64);
        query->depths[slot] = (uint32_t)query->keys->count;
        living++;
    }
    for (size_t position = 0; position < query->keys->count && living; position++) {
        uint32_t set = set_at(query, position);
        if (set != before || !position)
            living -= keep_holders(query, set, words, position);
        before = set;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = query->slots[i];
        if (slot != NOBODY && index->holders[slot].blocks[NPU])
            query->coverages[i].npu = query->depths[slot];
    }
}

static bool has_pool_members(const Query *query, uint32_t set)
{
    if (!set || set & SINGLE)
        return set && tier_of(set) != NPU;
    return query->index->sets.rows[set]->elsewhere;
}

/* Whether any location that all can reach is among the members with this tier. */
static bool in_pools(Query *query, uint32_t set, uint32_t tier)
{
    const Sets *sets = &query->index->sets;
    if (!query->in_pools) {
        query->in_pools = ++query->scratch->stamp;
        for (uint32_t i = 0; i < query->candidates->pool_count; i++) {
            uint32_t slot = query->candidates->pool_slots[i];
            if (slot != NOBODY)
                query->pool[slot] = query->in_pools;
        }
    }
    for (uint32_t i = 0, count = set_count(sets, set); i < count; i++) {
        uint32_t member = set_member(sets, set, i);
        if (tier_of(member) == tier && query->pool[slot_of(member)] == query->in_pools)
            return true;
    }
    return false;
}

/* Whether the candidate or a location local to it has the stamp. */
static bool is_local(const Query *query, const uint32_t *stamps, uint32_t stamp, uint32_t candidate)
{
    const Candidates *candidates = query->candidates;
    uint32_t slot = query->slots[candidate];
    if (slot != NOBODY && stamps[slot] == stamp)
        return true;
    for (uint32_t i = candidate ? candidates->local_ends[candidate - 1] : 0; i < candidates->local_ends[candidate]; i++)
        if (query->local_slots[i] != NOBODY && stamps[query->local_slots[i]] == stamp)
            return true;
    return false;
}

/* Count blocks start to end - 1, which all have the same holders, for the candidates that are not yet at their end. */
static uint32_t count_run(Query *query, uint32_t set, uint32_t start, uint32_t end, uint32_t open)
{
    bool cpu_pool = in_pools(query, set, CPU), disk_pool = in_pools(query, set, DISK);
    stamp_members(query, set);
    uint32_t stamp = query->scratch->stamp, left = 0;
    for (uint32_t i = 0; i < open; i++) {
        uint32_t candidate = query->open[i];
        Coverage *coverage = query->coverages + candidate;
        if (coverage->npu >= end) {
            query->open[left++] = candidate;
            continue;
        }
        uint32_t *place = NULL;
        if (is_local(query, query->cpu, stamp, candidate))
            place = &coverage->cpu_local;
        else if (cpu_pool)
            place = &coverage->cpu_remote;
        else if (is_local(query, query->disk, stamp, candidate))
            place = &coverage->disk_local;
        else if (disk_pool)
            place = &coverage->disk_remote;
        if (!place)
            continue;
        *place += end - (coverage->npu > start ? coverage->npu : start);
        query->open[left++] = candidate;
    }
    return left;
}

/* Nobody has block `start` in a pool: candidates whose prefix ends there are at their end, the walk goes on behind the
 * shortest prefix of the others. */
static uint32_t drop_ended(Query *query, size_t *start, uint32_t open)
{
    size_t next = query->keys->count;
    uint32_t left = 0;
    for (uint32_t i = 0; i < open; i++) {
        uint32_t depth = query->coverages[query->open[i]].npu;
        if (depth <= *start)
            continue;
        query->open[left++] = query->open[i];
        next = depth < next ? depth : next;
    }
    *start = next;
    return left;
}

/* After its NPU prefix a candidate goes on through the pool, run by run, until nobody reachable has a block. */
static void walk_pools(Query *query)
{
    size_t count = query->keys->count, start = count;
    uint32_t open = 0;
    for (uint32_t i = 0; i < query->candidates->count; i++) {
        uint32_t depth = query->coverages[i].npu;
        if (depth < count)
            query->open[open++] = i;
        start = depth < start ? depth : start;
    }
    while (start < count && open) {
        uint32_t set = set_at(query, start);
        if (!has_pool_members(query, set)) {
            open = drop_ended(query, &start, open);
            continue;
        }
        size_t end = start + 1;
        while (end < count && set_at(query, end) == set)
            end++;
        open = count_run(query, set, (uint32_t)start, (uint32_t)end, open);
        start = end;
    }
}

void match(const Index *index, KeySource *keys, const Candidates *candidates, Coverage *coverages, Scratch *scratch)
{
    memset(coverages, 0, candidates->count * sizeof(Coverage));
    if (!index->held || !keys->count)
        return;
    Query query = {.index = index, .keys = keys, .candidates = candidates, .coverages = coverages, .scratch = scratch};
    prepare(&query);
    find_depths(&query);
    if (index->pool_memberships)
        walk_pools(&query);
}
