#include "core.h"

#include <stdlib.h>

enum { SEEN_PER_CLAIM = 16, SAMPLES = 1024 };

/* Drop up to `claims` claims of a holder in a tier, looking at up to `seen` entries; blocks that left. */
static uint64_t clear_tier(Index *index, uint32_t slot, uint32_t tier, uint64_t *claims, uint64_t *seen)
{
    Holder *holder = index->holders + slot;
    Cursor *cursor = holder->cursor + tier;
    uint32_t member = member_of(slot, tier);
    uint64_t left = 0;
    while (holder->claims[tier] && *claims && *seen) {
        Entry *entry = table_next(&index->names, cursor);
        --*seen;
        if (!entry) {
            *cursor = (Cursor){0, 0};
        } else if (set_contains(&index->sets, entry->set, member)) {
            bool alone = set_count(&index->sets, entry->set) == 1;
            left += release(index, slot, tier, entry);
            --*claims;
            if (alone)
                table_stay(cursor);
        }
    }
    index->forgotten -= holder->forgotten[tier];
    holder->forgotten[tier] = 0;
    return left;
}

static uint64_t clear(Index *index, uint32_t holder, const bool *tiers, uint64_t claims, uint64_t seen, bool *more)
{
    uint32_t slot;
    *more = false;
    if (!holder_find(index, holder, &slot))
        return 0;
    Holder *known = index->holders + slot;
    uint64_t left = 0;
    known->busy++;
    waiting_clear(index, slot, tiers);
    for (uint32_t tier = 0; tier < TIERS; tier++) {
        if (!tiers[tier] || !known->claims[tier])
            continue;
        left += clear_tier(index, slot, tier, &claims, &seen);
        *more = *more || known->claims[tier];
    }
    known->busy--;
    holder_release_if_idle(index, slot);
    return left;
}

uint64_t index_cleared(Index *index, uint32_t holder, const bool *tiers)
{
    bool more;
    return clear(index, holder, tiers, UINT64_MAX, UINT64_MAX, &more);
}

bool index_clear_some(Index *index, uint32_t holder, const bool *tiers, uint64_t limit)
{
    bool more;
    clear(index, holder, tiers, limit, SEEN_PER_CLAIM * limit, &more);
    return more;
}

static int by_tick(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* The tick up to which leaves go when `share` of them have to: an estimate from a sample. */
static uint32_t horizon_of(const Index *index, double share)
{
    uint32_t ticks[SAMPLES], count = 0;
    uint64_t rows = (uint64_t)(index->blocks.used - 1) * CHUNK_ROWS, step = rows / (4 * SAMPLES) + 1;
    for (uint64_t row = index->calls % step; row < rows && count < SAMPLES; row += step) {
        const Chunk *chunk = index->blocks.chunks + 1 + row / CHUNK_ROWS;
        const Block *block = chunk->rows ? chunk->rows + row % CHUNK_ROWS : NULL;
        if (block && block->references && !block->children)
            ticks[count++] = block->tick;
    }
    if (!count)
        return index->calls;
    qsort(ticks, count, sizeof *ticks, by_tick);
    uint32_t place = (uint32_t)(share * count);
    return ticks[place < count ? place : count - 1];
}

/* Drop every claim under an entry; how many. */
static uint64_t forget(Index *index, Entry *entry)
{
    uint64_t number = set_count(&index->sets, entry->set);
    for (uint64_t left = number; left; left--) {
        uint32_t member = set_member(&index->sets, entry->set, 0), slot = slot_of(member), tier = tier_of(member);
        release(index, slot, tier, entry);
        index->holders[slot].forgotten[tier]++;
        index->forgotten++;
        holder_release_if_idle(index, slot);
    }
    index->counters.evicted += number;
    return number;
}

bool index_shrink(Index *index, uint64_t bytes, uint64_t limit)
{
    uint64_t seen = 0, dropped = 0;
    while (index->memory.bytes > bytes && index->claims) {
        if (!index->sweep.running) {
            double excess = (double)(index->memory.bytes - bytes) / (double)index->memory.bytes;
            index->sweep.horizon = horizon_of(index, excess);
            index->sweep.cursor = (Cursor){0, 0};
            index->sweep.running = true;
        }
        if (dropped >= limit || ++seen > SEEN_PER_CLAIM * limit)
            return true;
        Entry *entry = table_next(&index->names, &index->sweep.cursor);
        if (!entry) {
            index->sweep.running = false;
            continue;
        }
        const Block *block = block_at(&index->blocks, entry->id);
        if (block->children || (int32_t)(block->tick - index->sweep.horizon) > 0)
            continue;
        dropped += forget(index, entry);
        table_stay(&index->sweep.cursor);
    }
    index->sweep.running = false;
    return false;
}
