/* Interned sets of members; a member is (holder slot, tier). Whoever has the same members shares one set.
 *
 * Members are ordered by tier, then by slot.
 *
 * A set is a u32: 0 is the empty set, a set of one member is SINGLE | member and needs no memory, any other is the
 * number of a row. Sets are counted by those who keep them: set_keep and set_drop.
 */
#ifndef KVROUTE_SETS_H
#define KVROUTE_SETS_H

#include "table.h"

#define SINGLE 0x80000000U
enum { SLOT_BITS = 29 };

static inline uint32_t member_of(uint32_t slot, uint32_t tier) { return (tier << SLOT_BITS) | slot; }
static inline uint32_t slot_of(uint32_t member) { return member & ((1U << SLOT_BITS) - 1); }
static inline uint32_t tier_of(uint32_t member) { return member >> SLOT_BITS & 3; }

/* members: ascending. words: of the bitmap of the slots that are members in the NPU, which stands behind the members
 * of sets that are large enough to be worth it. elsewhere: whether any is a member in another tier. */
typedef struct {
    uint64_t hash;
    uint32_t references;
    uint32_t count;
    uint16_t words;
    bool elsewhere;
    uint32_t members[];
} SetRow;

enum { BITMAP_FROM = 12 };

static inline const uint64_t *set_bitmap(const SetRow *row)
{
    size_t head = sizeof(SetRow) + row->count * sizeof(uint32_t);
    return (const uint64_t *)(const void *)((const char *)row + (head + 7) / 8 * 8);
}

/* A change that was computed before; rows are told from earlier ones under the same number by their age. */
typedef struct {
    uint32_t from, to, member, from_age, to_age;
} Transition;

enum { TRANSITIONS = 1024 };

/* hash_mask: fewer than 64 bits only to test collisions. */
typedef struct {
    Memory *memory;
    SetRow **rows;
    uint32_t *ages;
    uint32_t capacity, used, first_free;
    uint64_t hash_mask;
    Table interned;
    Transition added[TRANSITIONS], removed[TRANSITIONS];
    Transition last_added, last_removed;
} Sets;

void sets_init(Sets *sets, Memory *memory, uint64_t hash_mask);
void sets_free(Sets *sets);
/* The set with this member in it, or without it. The result is not kept yet. */
uint32_t set_with(Sets *sets, uint32_t set, uint32_t member);
uint32_t set_without(Sets *sets, uint32_t set, uint32_t member);
bool set_contains(const Sets *sets, uint32_t set, uint32_t member);
void set_free_row(Sets *sets, uint32_t set);

static inline void set_keep(Sets *sets, uint32_t set)
{
    if (set && !(set & SINGLE))
        sets->rows[set]->references++;
}

static inline void set_drop(Sets *sets, uint32_t set)
{
    if (set && !(set & SINGLE) && !--sets->rows[set]->references)
        set_free_row(sets, set);
}

static inline uint32_t set_count(const Sets *sets, uint32_t set)
{
    return !set ? 0 : set & SINGLE ? 1 : sets->rows[set]->count;
}

static inline uint32_t set_member(const Sets *sets, uint32_t set, uint32_t position)
{
    return set & SINGLE ? set & ~SINGLE : sets->rows[set]->members[position];
}

#endif
