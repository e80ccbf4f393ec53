#include "sets.h"

#include <string.h>

static size_t row_size(uint32_t count, uint32_t words)
{
    return (sizeof(SetRow) + count * sizeof(uint32_t) + 7) / 8 * 8 + words * sizeof(uint64_t);
}

void sets_init(Sets *sets, Memory *memory, uint64_t hash_mask)
{
    memset(sets, 0, sizeof *sets);
    sets->memory = memory;
    sets->hash_mask = hash_mask;
    table_init(&sets->interned, memory);
}

void sets_free(Sets *sets)
{
    for (uint32_t number = 1; number < sets->used; number++)
        if (sets->ages[number] & 1)
            memory_give(sets->memory, sets->rows[number], row_size(sets->rows[number]->count, sets->rows[number]->words));
    memory_give(sets->memory, sets->rows, sets->capacity * sizeof(SetRow *));
    memory_give(sets->memory, sets->ages, sets->capacity * sizeof(uint32_t));
    table_free(&sets->interned);
    sets_init(sets, sets->memory, sets->hash_mask);
}

/* An odd age means that the row is in use. */
static uint32_t age_of(const Sets *sets, uint32_t set) { return set && !(set & SINGLE) ? sets->ages[set] : 1; }

/* A free number; the free ones are linked through their rows' places. */
static uint32_t take_number(Sets *sets)
{
    uint32_t number = sets->first_free;
    if (number) {
        sets->first_free = (uint32_t)(uintptr_t)sets->rows[number];
    } else {
        if (!sets->used)
            sets->used = 1;
        number = sets->used++;
        if (number >= sets->capacity) {
            uint32_t capacity = sets->capacity ? 2 * sets->capacity : 64;
            sets->rows = memory_resize(
                sets->memory, sets->rows, sets->capacity * sizeof(SetRow *), capacity * sizeof(SetRow *));
            sets->ages = memory_resize(
                sets->memory, sets->ages, sets->capacity * sizeof(uint32_t), capacity * sizeof(uint32_t));
            sets->capacity = capacity;
        }
    }
    sets->ages[number]++;
    return number;
}

void set_free_row(Sets *sets, uint32_t set)
{
    SetRow *row = sets->rows[set];
    Entry *entry = table_find(&sets->interned, row->hash);
    while (entry->id != set)
        entry = table_next_same(entry);
    table_remove(&sets->interned, entry);
    memory_give(sets->memory, row, row_size(row->count, row->words));
    sets->rows[set] = (SetRow *)(uintptr_t)sets->first_free;
    sets->first_free = set;
    sets->ages[set]++;
}

/* Position of the first member that is not below this one. */
static uint32_t position_of(const uint32_t *members, uint32_t count, uint32_t member)
{
    uint32_t low = 0;
    while (count) {
        uint32_t half = count / 2;
        if (members[low + half] < member) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

bool set_contains(const Sets *sets, uint32_t set, uint32_t member)
{
    if (!set || set & SINGLE)
        return set == (SINGLE | member);
    /* What was just found out about a set is asked again for the next block of a chain. */
    const Transition *added = &sets->last_added, *removed = &sets->last_removed;
    if (added->from == set && added->member == member && added->from_age == sets->ages[set])
        return false;
    if (removed->from == set && removed->member == member && removed->from_age == sets->ages[set])
        return true;
    const SetRow *row = sets->rows[set];
    uint32_t position = position_of(row->members, row->count, member);
    return position < row->count && row->members[position] == member;
}

static uint64_t member_hash(uint32_t member) { return mix_well(member + 0x9E3779B97F4A7C15ULL); }

/* What the members of `row` are after one is put in at `position`, or left out there, as a difference. */
typedef struct {
    const uint32_t *members;
    uint32_t count, position, member;
    bool added;
} Change;

static bool is_changed(const SetRow *row, const Change *change)
{
    uint32_t count = change->count + (change->added ? 1 : -1), skip = change->added ? 0 : 1;
    const uint32_t *now = row->members, *before = change->members;
    if (row->count != count || memcmp(now, before, change->position * sizeof(uint32_t)))
        return false;
    if (change->added && now[change->position] != change->member)
        return false;
    uint32_t rest = change->count - change->position - skip;
    return !memcmp(now + change->position + (change->added ? 1 : 0), before + change->position + skip,
                   rest * sizeof(uint32_t));
}

/* Enough for every slot that is a member in the NPU, before and after. */
static uint32_t words_for(const Change *change)
{
    uint32_t most = tier_of(change->member) ? 0 : change->member;
    for (uint32_t i = change->count; i--;)
        if (!tier_of(change->members[i])) {
            most = change->members[i] > most ? change->members[i] : most;
            break;
        }
    return most / 64 + 1;
}

static uint32_t intern(Sets *sets, const Change *change, uint64_t hash)
{
    hash &= sets->hash_mask;
    for (Entry *entry = table_find(&sets->interned, hash); entry; entry = table_next_same(entry))
        if (is_changed(sets->rows[entry->id], change))
            return entry->id;
    uint32_t count = change->count + (change->added ? 1 : -1), skip = change->added ? 0 : 1;
    uint32_t words = count < BITMAP_FROM ? 0 : words_for(change);
    words = words > UINT16_MAX ? 0 : words;
    SetRow *row = memory_take(sets->memory, row_size(count, words));
    row->hash = hash;
    row->count = count;
    row->words = (uint16_t)words;
    memcpy(row->members, change->members, change->position * sizeof(uint32_t));
    if (change->added)
        row->members[change->position] = change->member;
    memcpy(row->members + change->position + (change->added ? 1 : 0), change->members + change->position + skip,
           (change->count - change->position - skip) * sizeof(uint32_t));
    uint64_t *bitmap = words ? (uint64_t *)(uintptr_t)set_bitmap(row) : NULL;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t member = row->members[i];
        if (tier_of(member))
            row->elsewhere = true;
        else if (words)
            bitmap[member / 64] |= 1ULL << (member % 64);
    }
    uint32_t number = take_number(sets);
    sets->rows[number] = row;
    table_insert(&sets->interned, hash, number, 0);
    return number;
}

static uint64_t full_hash(const uint32_t *members, uint32_t count)
{
    uint64_t hash = 0;
    for (uint32_t i = 0; i < count; i++)
        hash += member_hash(members[i]);
    return hash;
}

static uint32_t change_set(Sets *sets, uint32_t set, uint32_t member, bool added)
{
    Transition *last = added ? &sets->last_added : &sets->last_removed;
    if (last->from == set && last->member == member && last->from_age == age_of(sets, set)
        && last->to_age == age_of(sets, last->to))
        return last->to;
    Transition *known = (added ? sets->added : sets->removed)
                        + ((mix_well(((uint64_t)set << 32) | member) >> 40) & (TRANSITIONS - 1));
    if (known->from == set && known->member == member && known->from_age == age_of(sets, set)
        && known->to_age == age_of(sets, known->to)) {
        *last = *known;
        return known->to;
    }
    uint32_t single = set & ~SINGLE;
    Change change = {&single, 1, 0, member, added};
    if (!(set & SINGLE)) {
        change.members = sets->rows[set]->members;
        change.count = sets->rows[set]->count;
    }
    change.position = position_of(change.members, change.count, member);
    uint64_t hash = set & SINGLE || sets->hash_mask != UINT64_MAX ? full_hash(change.members, change.count)
                                                                  : sets->rows[set]->hash;
    hash = added ? hash + member_hash(member) : hash - member_hash(member);
    uint32_t to = intern(sets, &change, hash);
    *last = *known = (Transition){set, to, member, age_of(sets, set), age_of(sets, to)};
    return to;
}

uint32_t set_with(Sets *sets, uint32_t set, uint32_t member)
{
    if (!set)
        return SINGLE | member;
    return set_contains(sets, set, member) ? set : change_set(sets, set, member, true);
}

uint32_t set_without(Sets *sets, uint32_t set, uint32_t member)
{
    if (!set_contains(sets, set, member))
        return set;
    if (set & SINGLE)
        return 0;
    const SetRow *row = sets->rows[set];
    if (row->count == 2)
        return SINGLE | row->members[row->members[0] == member];
    return change_set(sets, set, member, false);
}
