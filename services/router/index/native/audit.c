#include "snapshot.h"

#include <stdarg.h>
#include <stdio.h>

/* A recount: claims per (member, block), references per block and per set. */
typedef struct {
    const Index *index;
    Violations *violations;
    Memory memory;
    Pairs claims, references, uses, children, names, name_blocks;
} Recount;

__attribute__((format(printf, 2, 3))) static void wrong(Recount *recount, const char *format, ...)
{
    Violations *violations = recount->violations;
    if (violations->count == MAX_VIOLATIONS)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(violations->texts[violations->count++], sizeof violations->texts[0], format, arguments);
    va_end(arguments);
}

static void add(Pairs *pairs, uint32_t first, uint64_t second)
{
    uint64_t *known = pairs_find(pairs, first, second);
    pairs_put(pairs, first, second, known ? *known + 1 : 1);
}

static uint64_t counted(const Pairs *pairs, uint32_t first, uint64_t second)
{
    uint64_t *known = pairs_find(pairs, first, second);
    return known ? *known : 0;
}

static void check_table(Recount *recount, const Table *table, const char *name)
{
    Cursor cursor = {0, 0};
    uint64_t count = 0, before = 0;
    for (const Entry *entry; (entry = table_next(table, &cursor)); count++) {
        const Segment *segment = table_segment(table, entry->hash);
        const Entry *home = segment->slots + table_slot_of(segment, entry->hash);
        if (entry->hash < before || entry < home || entry >= segment->slots + segment->length)
            wrong(recount, "%s: an entry is out of order", name);
        for (const Entry *between = home; between < entry; between++)
            if (!between->id)
                wrong(recount, "%s: a gap before an entry", name);
        before = entry->hash;
    }
    if (count != table->count)
        wrong(recount, "%s: %llu entries are counted, there are %llu", name, (unsigned long long)table->count,
              (unsigned long long)count);
}

/* Names per domain, and claims. */
static uint64_t recount_names(Recount *recount)
{
    const Index *index = recount->index;
    Cursor cursor = {0, 0};
    uint64_t claims = 0;
    check_table(recount, &index->names, "names");
    for (const Entry *entry; (entry = table_next(&index->names, &cursor));) {
        uint32_t count = set_count(&index->sets, entry->set);
        if (!count)
            wrong(recount, "a name that nobody claims");
        for (Entry *other = table_next_same((Entry *)(uintptr_t)entry); other; other = table_next_same(other))
            if (other->id == entry->id)
                wrong(recount, "a name twice for one block");
        add(&recount->references, 0, entry->id);
        if (!(entry->set & SINGLE))
            add(&recount->uses, 0, entry->set);
        for (uint32_t i = 0; i < count; i++, claims++) {
            uint32_t member = set_member(&index->sets, entry->set, i);
            const Holder *holder = index->holders + slot_of(member);
            if (slot_of(member) >= index->holders_used || !holder->used || !holder->claims[tier_of(member)]) {
                wrong(recount, "a claim of nobody");
                continue;
            }
            uint32_t domain = holder->domain[tier_of(member)]->number;
            add(&recount->claims, member, entry->id);
            add(&recount->names, domain, unmix(entry->hash));
            add(&recount->name_blocks, domain, mix(entry->hash) + entry->id);
        }
    }
    return claims;
}

/* A meaning stands beside the names exactly where the claims of a domain disagree with each other or with it. */
static void check_meanings(Recount *recount)
{
    const Index *index = recount->index;
    uint64_t place = 0, names = 0;
    for (const Pair *pair; (pair = pairs_next(&recount->names, &place)); names++) {
        uint64_t *meaning = pairs_find(&index->meanings, pair->first, pair->second);
        uint64_t blocks = 0, hash = mix(pair->second);
        bool said = false;
        for (Entry *entry = table_find(&index->names, hash); entry; entry = table_next_same(entry))
            if (counted(&recount->name_blocks, pair->first, mix(hash) + entry->id)) {
                blocks++;
                said = said || (meaning && entry->id == *meaning);
            }
        if (!meaning ? blocks != 1 : blocks == 1 && said)
            wrong(recount, "domain %u: a name with %llu blocks", pair->first, (unsigned long long)blocks);
    }
    place = 0;
    for (const Pair *pair; (pair = pairs_next(&index->meanings, &place));) {
        add(&recount->references, 0, pair->value);
        if (!pairs_find(&recount->names, pair->first, pair->second))
            wrong(recount, "domain %u: a meaning without a claim", pair->first);
    }
    place = 0;
    uint64_t counted_names = 0, shelves = 0;
    for (const Pair *pair; (pair = pairs_next(&index->domains, &place));) {
        const Domain *domain = (const Domain *)(uintptr_t)pair->value;
        counted_names += domain->names;
        shelves += domain->shelves;
        if (!domain->shelves || domain->open || !domain->names)
            wrong(recount, "domain %u is empty or open", domain->number);
    }
    for (uint32_t slot = 0; slot < index->holders_used; slot++)
        for (int tier = 0; tier < TIERS; tier++)
            shelves -= index->holders[slot].used && index->holders[slot].claims[tier];
    if (names != index->name_count || names != counted_names || shelves)
        wrong(recount, "%llu names are counted, there are %llu", (unsigned long long)index->name_count,
              (unsigned long long)names);
}

static void check_blocks(Recount *recount)
{
    const Index *index = recount->index;
    uint64_t held = 0, memberships = 0;
    Cursor cursor = {0, 0};
    check_table(recount, &index->keys, "keys");
    for (const Entry *entry; (entry = table_next(&index->keys, &cursor));) {
        const Block *block = block_at(&index->blocks, entry->id);
        if (block->parent)
            add(&recount->children, 0, block->parent);
        held += entry->set != 0;
        if (entry->set && !(entry->set & SINGLE))
            add(&recount->uses, 0, entry->set);
        for (uint32_t i = 0, count = set_count(&index->sets, entry->set); i < count; i++, memberships++)
            if (!counted(&recount->claims, set_member(&index->sets, entry->set, i), entry->id))
                wrong(recount, "a block is held that nobody claims");
        if (block->hash != entry->hash || block->references != counted(&recount->references, 0, entry->id))
            wrong(recount, "a block with %u references", block->references);
        if (!block->references && !block->children)
            wrong(recount, "a block that nobody needs");
    }
    cursor = (Cursor){0, 0};
    for (const Entry *entry; (entry = table_next(&index->keys, &cursor));)
        if (block_at(&index->blocks, entry->id)->children != counted(&recount->children, 0, entry->id))
            wrong(recount, "a block with a wrong number of children");
    if (held != index->held || memberships != index->memberships || memberships != recount->claims.count)
        wrong(recount, "%llu blocks held %llu times are counted, there are %llu held %llu times",
              (unsigned long long)index->held, (unsigned long long)index->memberships, (unsigned long long)held,
              (unsigned long long)memberships);
    if (index->blocks.count != index->keys.count)
        wrong(recount, "keys and blocks differ in number");
}

static void check_holders(Recount *recount, uint64_t claims)
{
    const Index *index = recount->index;
    uint64_t place = 0, held = 0, elsewhere = 0, extra = 0, forgotten = 0, waiting = 0, used = 0;
    for (const Pair *pair; (pair = pairs_next(&recount->claims, &place));) {
        uint64_t copies = counted(&index->copies, pair->first, pair->second);
        extra += copies;
        if (copies != pair->value - 1)
            wrong(recount, "copies of a block differ from its claims");
    }
    for (uint32_t slot = 0; slot < index->holders_used; slot++) {
        const Holder *holder = index->holders + slot;
        if (!holder->used)
            continue;
        uint64_t own = 0, chains = 0;
        used++;
        for (int tier = 0; tier < TIERS; tier++) {
            held += holder->blocks[tier];
            elsewhere += tier == NPU ? 0 : holder->blocks[tier];
            own += holder->claims[tier];
            forgotten += holder->forgotten[tier];
        }
        for (const Link *link = holder->waiting.first; link; link = link->after)
            chains += link->chain->live;
        waiting += chains;
        if (chains != holder->waiting_blocks || holder->busy || (!own && !chains))
            wrong(recount, "holder %u is idle, busy, or counts its waiting blocks wrong", holder->holder);
        claims -= own;
    }
    if (claims || held != index->memberships || elsewhere != index->pool_memberships || forgotten != index->forgotten || waiting != index->room.blocks
        || used != index->holder_slots.count)
        wrong(recount, "what holders count differs from the claims");
    place = 0;
    for (const Pair *pair; (pair = pairs_next(&index->repeats, &place));) {
        const Holder *holder = index->holders + slot_of(pair->first);
        if (!holder->used || !holder->claims[tier_of(pair->first)] || !name_claimed(index, pair->second, pair->first))
            wrong(recount, "repeated stores without a claim");
    }
    if (index->claims - index->memberships != extra)
        wrong(recount, "claims are counted wrong");
}

static void check_sets(Recount *recount)
{
    const Sets *sets = &recount->index->sets;
    uint64_t live = 0;
    check_table(recount, &sets->interned, "sets");
    for (uint32_t number = 1; number < sets->used; number++) {
        if (!(sets->ages[number] & 1))
            continue;
        const SetRow *row = sets->rows[number];
        live++;
        if (row->count < 2 || row->references != counted(&recount->uses, 0, number))
            wrong(recount, "a set of %u has %u references", row->count, row->references);
        for (uint32_t i = 1; i < row->count; i++)
            if (row->members[i - 1] >= row->members[i])
                wrong(recount, "members of a set are out of order");
    }
    if (live != sets->interned.count)
        wrong(recount, "sets are counted wrong");
}

static void check_waiting(Recount *recount)
{
    const WaitingRoom *room = &recount->index->room;
    uint64_t blocks = 0;
    for (const Link *link = room->by_age.first; link; link = link->after) {
        const Chain *chain = link->chain;
        uint32_t live = 0, places = 0;
        for (uint32_t i = 0; i < chain->count; i++)
            live += !chain->gone[i];
        for (uint32_t i = 0; i < chain->links; i++)
            places += chain->by_name[i].places;
        blocks += live;
        if (live != chain->live || places != live || !live)
            wrong(recount, "a waiting chain counts %u blocks", chain->live);
        const Domain *domain = domain_find(recount->index, chain->domain);
        if ((domain && name_meaning(recount->index, domain, chain->parent)) || !waiting_for(room, chain->domain, chain->parent))
            wrong(recount, "a chain waits for a name that is there, or cannot be found");
    }
    if (blocks != room->blocks || blocks > room->max_blocks)
        wrong(recount, "%llu blocks wait", (unsigned long long)room->blocks);
}

void audit(const Index *index, Violations *violations)
{
    Recount recount = {.index = index, .violations = violations};
    Pairs *all[] = {&recount.claims,   &recount.references, &recount.uses,
                    &recount.children, &recount.names,      &recount.name_blocks};
    for (int i = 0; i < 6; i++)
        pairs_init(all[i], &recount.memory);
    uint64_t claims = recount_names(&recount);
    check_meanings(&recount);
    if (claims != index->claims)
        wrong(&recount, "claims are counted wrong");
    check_blocks(&recount);
    check_holders(&recount, claims);
    check_sets(&recount);
    check_waiting(&recount);
    for (int i = 0; i < 6; i++)
        pairs_free(all[i]);
}
