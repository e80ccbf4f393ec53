#include "core.h"

bool domain_has(const Index *index, const Domain *domain, uint32_t set)
{
    const Sets *sets = &index->sets;
    if (domain->slot != SEVERAL) {
        const Holder *holder = index->holders + domain->slot;
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (holder->claims[tier] && holder->domain[tier] == domain
                && set_contains(sets, set, member_of(domain->slot, tier)))
                return true;
        return false;
    }
    /* From the end, where the few are that are not in an NPU. */
    for (uint32_t i = set_count(sets, set); i--;) {
        uint32_t member = set_member(sets, set, i);
        if (index->holders[slot_of(member)].domain[tier_of(member)] == domain)
            return true;
    }
    return false;
}

uint32_t name_meaning(const Index *index, const Domain *domain, uint64_t name)
{
    uint64_t *meaning = pairs_find(&index->meanings, domain->number, name);
    if (meaning)
        return (uint32_t)*meaning;
    for (Entry *entry = table_find(&index->names, mix(name)); entry; entry = table_next_same(entry))
        if (domain_has(index, domain, entry->set))
            return entry->id;
    return 0;
}

Entry *name_claimed(const Index *index, uint64_t name, uint32_t member)
{
    Entry *entry = table_find(&index->names, mix(name));
    while (entry && !set_contains(&index->sets, entry->set, member))
        entry = table_next_same(entry);
    return entry;
}

uint32_t block_of_key(const Index *index, uint64_t key)
{
    Entry *entry = table_find(&index->keys, mix(key));
    return entry ? entry->id : 0;
}

void block_pin(Index *index, uint32_t block)
{
    if (block)
        block_at(&index->blocks, block)->references++;
}

void block_unpin(Index *index, uint32_t number)
{
    if (!number)
        return;
    Block *block = block_at(&index->blocks, number);
    block->references--;
    /* Without a name nobody can hold it, so only its children can still need it. */
    while (!block->references && !block->children) {
        uint32_t parent = block->parent, tick = block->tick;
        table_remove(&index->keys, table_find(&index->keys, block->hash));
        block_give(&index->blocks, number);
        if (!parent)
            return;
        number = parent;
        block = block_at(&index->blocks, number);
        block->children--;
        block->tick = block->tick > tick ? block->tick : tick;
    }
}

static void change_set(Index *index, Entry *entry, uint32_t set)
{
    set_keep(&index->sets, set);
    set_drop(&index->sets, entry->set);
    entry->set = set;
}

static void meaning_remove(Index *index, uint32_t domain, uint64_t name)
{
    uint64_t *meaning = pairs_find(&index->meanings, domain, name);
    if (!meaning)
        return;
    uint32_t block = (uint32_t)*meaning;
    pairs_remove(&index->meanings, domain, name);
    block_unpin(index, block);
}

static void meaning_put(Index *index, uint32_t domain, uint64_t name, uint32_t block)
{
    block_pin(index, block);
    meaning_remove(index, domain, name);
    pairs_put(&index->meanings, domain, name, block);
}

void change_meaning(Index *index, const Domain *domain, uint64_t name, uint32_t block)
{
    for (Entry *entry = table_find(&index->names, mix(name)); entry; entry = table_next_same(entry))
        if (entry->id != block && domain_has(index, domain, entry->set)) {
            meaning_put(index, domain->number, name, block);
            return;
        }
    meaning_remove(index, domain->number, name);
}

/* After a claim of this domain has gone: whether the name still means anything there. */
static bool settle_meaning(Index *index, Domain *domain, uint64_t hash)
{
    /* Only this shelf has claims here, and it has but one under a name. */
    if (domain->shelves == 1) {
        meaning_remove(index, domain->number, unmix(hash));
        return false;
    }
    uint64_t *meaning = pairs_find(&index->meanings, domain->number, unmix(hash));
    bool claimed = false, agreed = true;
    for (Entry *entry = table_find(&index->names, hash); entry; entry = table_next_same(entry))
        if (domain_has(index, domain, entry->set)) {
            claimed = true;
            if (!meaning)
                return true;
            agreed = agreed && entry->id == *meaning;
        }
    if (meaning && (!claimed || agreed))
        meaning_remove(index, domain->number, unmix(hash));
    return claimed;
}

bool release(Index *index, uint32_t slot, uint32_t tier, Entry *entry)
{
    Holder *holder = index->holders + slot;
    Domain *domain = holder->domain[tier];
    uint32_t member = member_of(slot, tier), block = entry->id;
    uint64_t hash = entry->hash;
    if (index->repeats.count)
        pairs_remove(&index->repeats, member, unmix(hash));
    change_set(index, entry, set_without(&index->sets, entry->set, member));
    bool last = !entry->set;
    if (last)
        table_remove(&index->names, entry);
    if (!settle_meaning(index, domain, hash)) {
        domain->names--;
        index->name_count--;
    }
    index->claims--;
    if (!--holder->claims[tier] && !--domain->shelves) {
        domain->open++;
        domain_close(index, domain);
    }
    uint64_t *copies = pairs_find(&index->copies, member, block);
    if (copies) {
        if (*copies > 1)
            --*copies;
        else
            pairs_remove(&index->copies, member, block);
    } else {
        Entry *held = table_find(&index->keys, block_at(&index->blocks, block)->hash);
        change_set(index, held, set_without(&index->sets, held->set, member));
        index->held -= !held->set;
        holder->blocks[tier]--;
        index->memberships--;
        index->pool_memberships -= tier != NPU;
    }
    bool left = !copies;
    if (last)
        block_unpin(index, block);
    return left;
}

static uint32_t block_make(Index *index, uint64_t hash, uint32_t previous)
{
    uint32_t number = block_take(&index->blocks, hash);
    Block *block = block_at(&index->blocks, number);
    block->tick = index->calls;
    if (previous) {
        block->parent = previous;
        block_at(&index->blocks, previous)->children++;
    }
    return number;
}

static void attach_waiting(Index *index, uint32_t domain, uint64_t name, uint32_t block, Attaching *attaching)
{
    for (Queue *queue; (queue = waiting_for(&index->room, domain, name));) {
        Chain *chain = queue->first->chain;
        index->holders[chain->slot].busy++;
        waiting_detach(index, chain);
        chain->parent = block;
        block_pin(index, block);
        queue_append(&attaching->chains, &chain->by_age);
    }
}

/* Whether the domain, in which (slot, tier) has no claim under the name, has others. */
static bool is_named(const Index *index, const Domain *domain, uint32_t slot, uint32_t tier, Entry *first)
{
    if (!domain->shelves || (domain->shelves == 1 && index->holders[slot].claims[tier]))
        return false;
    for (Entry *entry = first; entry; entry = table_next_same(entry))
        if (domain_has(index, domain, entry->set))
            return true;
    return false;
}

static void open_shelf(Index *index, Domain *domain, uint32_t slot, uint32_t tier)
{
    if (!index->holders[slot].claims[tier]++) {
        domain->slot = !domain->shelves || domain->slot == slot ? slot : SEVERAL;
        domain->shelves++;
    }
    index->claims++;
}

uint32_t claim(Index *index, uint32_t slot, uint32_t tier, uint64_t name, uint64_t key, bool counted, uint32_t previous,
               Attaching *attaching)
{
    Domain *domain = index->holders[slot].domain[tier];
    uint32_t member = member_of(slot, tier);
    uint64_t hash = mix(name);
    Entry *held = table_find(&index->keys, mix(key));
    uint32_t block = held ? held->id : 0;
    Entry *own = NULL, *same = NULL, *first = table_find(&index->names, hash);
    for (Entry *entry = first; entry; entry = table_next_same(entry)) {
        if (set_contains(&index->sets, entry->set, member))
            own = entry;
        if (entry->id == block)
            same = entry;
    }
    if (own && own == same) {
        if (counted) {
            uint64_t *stores = pairs_find(&index->repeats, member, name);
            pairs_put(&index->repeats, member, name, stores ? *stores + 1 : 1);
        }
        if (pairs_find(&index->meanings, domain->number, name))
            change_meaning(index, domain, name, block);
        attaching->outcome.repeated++;
        return block;
    }
    if (!(held && held->set) && index->held >= index->max_blocks) {
        attaching->outcome.refused++;
        index->counters.evicted++;
        return 0;
    }
    bool renamed = own != NULL, made = !block;
    if (renamed) {
        /* What the old claim lets go of must not take these with it. */
        index->counters.renamed++;
        block_pin(index, block);
        block_pin(index, previous);
        domain->open++;
        release(index, slot, tier, own);
        domain->open--;
        first = table_find(&index->names, hash);
        for (same = first; same && same->id != block;)
            same = table_next_same(same);
    }
    bool named = is_named(index, domain, slot, tier, first);
    if (made) {
        block = block_make(index, mix(key), previous);
        held = table_insert(&index->keys, mix(key), block, 0);
    } else if (renamed) {
        held = table_find(&index->keys, mix(key));
    }
    if (same) {
        change_set(index, same, set_with(&index->sets, same->set, member));
    } else {
        table_insert(&index->names, hash, block, SINGLE | member);
        block_pin(index, block);
    }
    open_shelf(index, domain, slot, tier);
    if (set_contains(&index->sets, held->set, member)) {
        uint64_t *copies = pairs_find(&index->copies, member, block);
        pairs_put(&index->copies, member, block, copies ? *copies + 1 : 1);
        attaching->outcome.repeated++;
    } else {
        index->held += !held->set;
        change_set(index, held, set_with(&index->sets, held->set, member));
        index->holders[slot].blocks[tier]++;
        index->memberships++;
        index->pool_memberships += tier != NPU;
        attaching->outcome.attached++;
    }
    if (named) {
        change_meaning(index, domain, name, block);
    } else {
        domain->names++;
        index->name_count++;
        if (index->room.blocks)
            attach_waiting(index, domain->number, name, block, attaching);
    }
    if (renamed) {
        if (!made)
            block_unpin(index, block);
        block_unpin(index, previous);
    }
    return block;
}
