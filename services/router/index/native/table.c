#include "table.h"

#include <string.h>

enum { SMALLEST = 4, LARGEST = 4096 };

static uint32_t length_for(uint32_t capacity) { return capacity + 4 + capacity / 32; }

/* How many entries a segment takes before it grows, and below how many it shrinks. */
static uint32_t most_of(uint32_t capacity) { return capacity - capacity / 8; }

static uint32_t grown(uint32_t capacity) { return capacity + (capacity < 64 ? capacity / 2 : capacity / 4); }

static size_t slots_size(const Segment *segment) { return (segment->length + TOGETHER) * sizeof(Entry); }

Entry *table_find_slowly(Entry *entry, uint64_t hash)
{
    while (entry->id && entry->hash < hash)
        entry++;
    return entry->id && entry->hash == hash ? entry : NULL;
}

void table_init(Table *table, Memory *memory) { *table = (Table){.memory = memory}; }

/* The first directory place of a segment, and how many there are. */
static uint64_t places_of(const Table *table, uint64_t place, const Segment *segment, uint64_t *number)
{
    *number = 1ULL << (table->depth - segment->depth);
    return place & ~(*number - 1);
}

void table_free(Table *table)
{
    if (!table->directory)
        return;
    uint64_t size = 1ULL << table->depth, number;
    for (uint64_t place = 0; place < size; place += number) {
        Segment *segment = table->directory[place];
        places_of(table, place, segment, &number);
        memory_give(table->memory, segment->slots, slots_size(segment));
        memory_give(table->memory, segment, sizeof(Segment));
    }
    memory_give(table->memory, table->directory, size * sizeof(Segment *));
    table_init(table, table->memory);
}

/* Lay sorted entries out in a segment that has none; false when they do not fit its length. */
static bool lay_out(Segment *segment, const Entry *entries, uint32_t count)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = table_slot_of(segment, entries[i].hash);
        slot = slot > next ? slot : next;
        if (slot >= segment->length)
            return false;
        segment->slots[slot] = entries[i];
        next = slot + 1;
    }
    segment->count = count;
    return true;
}

static void make_slots(Table *table, Segment *segment, const Entry *entries, uint32_t count, uint32_t capacity)
{
    for (;; capacity = grown(capacity)) {
        segment->capacity = capacity;
        segment->length = length_for(capacity);
        segment->slots = memory_take(table->memory, slots_size(segment));
        if (lay_out(segment, entries, count))
            return;
        memory_give(table->memory, segment->slots, slots_size(segment));
    }
}

/* The entries of a segment without gaps, in its own slots. */
static void pack(Segment *segment)
{
    uint32_t count = 0;
    for (uint32_t slot = 0; count < segment->count; slot++)
        if (segment->slots[slot].id)
            segment->slots[count++] = segment->slots[slot];
}

static void rebuild(Table *table, Segment *segment, uint32_t capacity)
{
    Entry *old = segment->slots;
    size_t size = slots_size(segment);
    pack(segment);
    make_slots(table, segment, old, segment->count, capacity);
    memory_give(table->memory, old, size);
}

static void double_directory(Table *table)
{
    uint64_t size = 1ULL << table->depth;
    Segment **directory = memory_take(table->memory, 2 * size * sizeof(Segment *));
    for (uint64_t place = 0; place < 2 * size; place++)
        directory[place] = table->directory[place / 2];
    memory_give(table->memory, table->directory, size * sizeof(Segment *));
    table->directory = directory;
    table->depth++;
}

static void split(Table *table, Segment *segment, uint64_t hash)
{
    if (segment->depth == table->depth)
        double_directory(table);
    uint64_t number, first = places_of(table, hash >> (64 - table->depth), segment, &number);
    Entry *old = segment->slots;
    size_t size = slots_size(segment);
    uint32_t count = segment->count, lower = 0;
    pack(segment);
    uint64_t bit = 1ULL << (63 - segment->depth);
    while (lower < count && !(old[lower].hash & bit))
        lower++;
    Segment *upper = memory_take(table->memory, sizeof(Segment));
    upper->depth = ++segment->depth;
    uint32_t capacity = segment->capacity / 2 + 1;
    make_slots(table, segment, old, lower, lower + lower / 4 > capacity ? lower + lower / 4 : capacity);
    uint32_t rest = count - lower;
    make_slots(table, upper, old + lower, rest, rest + rest / 4 > capacity ? rest + rest / 4 : capacity);
    memory_give(table->memory, old, size);
    for (uint64_t place = first + number / 2; place < first + number; place++)
        table->directory[place] = upper;
}

/* Entries with equal hashes stay together however often they are split, so the directory must not follow them. */
static bool may_split(const Table *table, const Segment *segment)
{
    return segment->capacity >= LARGEST && (1ULL << segment->depth) < 16 * (table->count / LARGEST + 1);
}

static void make_room(Table *table, Segment *segment, uint64_t hash)
{
    if (may_split(table, segment))
        split(table, segment, hash);
    else
        rebuild(table, segment, grown(segment->capacity));
}

Entry *table_insert(Table *table, uint64_t hash, uint32_t id, uint32_t set)
{
    if (!table->directory) {
        table->directory = memory_take(table->memory, sizeof(Segment *));
        table->directory[0] = memory_take(table->memory, sizeof(Segment));
        make_slots(table, table->directory[0], NULL, 0, SMALLEST);
    }
    for (;;) {
        Segment *segment = table_segment(table, hash);
        if (segment->count < most_of(segment->capacity)) {
            Entry *entry = segment->slots + table_slot_of(segment, hash);
            while (entry->id && entry->hash <= hash)
                entry++;
            Entry *hole = entry;
            while (hole->id)
                hole++;
            if (hole < segment->slots + segment->length) {
                memmove(entry + 1, entry, (size_t)(hole - entry) * sizeof(Entry));
                *entry = (Entry){hash, id, set};
                segment->count++;
                table->count++;
                return entry;
            }
        }
        make_room(table, segment, hash);
    }
}

void table_remove(Table *table, Entry *entry)
{
    Segment *segment = table_segment(table, entry->hash);
    Entry *last = entry;
    while (last[1].id && segment->slots + table_slot_of(segment, last[1].hash) <= last)
        last++;
    memmove(entry, entry + 1, (size_t)(last - entry) * sizeof(Entry));
    *last = (Entry){0, 0, 0};
    segment->count--;
    table->count--;
    if (!table->count)
        table_free(table);
    else if (segment->capacity > 2 * SMALLEST && segment->count < segment->capacity / 2)
        rebuild(table, segment, segment->count + segment->count / 3 + SMALLEST);
}

Entry *table_next(const Table *table, Cursor *cursor)
{
    uint64_t size = table->directory ? 1ULL << table->depth : 0, number;
    while (cursor->segment < size) {
        Segment *segment = table->directory[cursor->segment];
        uint64_t first = places_of(table, cursor->segment, segment, &number);
        for (; cursor->slot < segment->length; cursor->slot++)
            if (segment->slots[cursor->slot].id)
                return segment->slots + cursor->slot++;
        cursor->segment = first + number;
        cursor->slot = 0;
    }
    return NULL;
}

void table_stay(Cursor *cursor)
{
    if (cursor->slot)
        cursor->slot--;
}
