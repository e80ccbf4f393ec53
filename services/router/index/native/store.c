#include "core.h"

#include "../../../../schemas/native/block_hashes.h"

/* How far ahead memory is asked for. */
enum { AHEAD = 12, RING = 16 };

uint64_t key_after(const Index *index, uint64_t previous, uint64_t content)
{
    return xxh3_64_pair(HASH_SEED, previous, content) & index->key_mask;
}

uint64_t key_first(const Index *index, uint64_t root, uint64_t content)
{
    return root ? key_after(index, root, content) : content & index->key_mask;
}

/* A chain that is walked. gone: blocks to leave out, or NULL. previous: the block it follows, 0 for none. */
typedef struct {
    uint32_t slot, tier, domain;
    bool counted;
    const uint64_t *names, *contents;
    const uint8_t *gone;
    size_t count;
    uint32_t previous;
    uint64_t root;
} Walk;

static void walk(Index *index, const Walk *chain, Attaching *attaching)
{
    Domain *domain = domain_open(index, chain->slot, chain->tier, chain->domain);
    uint32_t previous = chain->previous;
    bool began = previous != 0;
    uint64_t key = began ? unmix(block_at(&index->blocks, previous)->hash) : 0, keys[RING];
    for (size_t i = 0, made = 0; i < chain->count; i++) {
        for (; made < chain->count && made < i + AHEAD; made++) {
            uint64_t content = chain->contents[made];
            key = began ? key_after(index, key, content) : key_first(index, chain->root, content);
            began = true;
            keys[made % RING] = key;
            table_prefetch(&index->keys, mix(key));
            table_prefetch(&index->names, mix(chain->names[made]));
        }
        previous = chain->gone && chain->gone[i]
                       ? block_of_key(index, keys[i % RING])
                       : claim(index, chain->slot, chain->tier, chain->names[i], keys[i % RING], chain->counted,
                               previous, attaching);
    }
    /* What others follow is no leaf, so only the last block's age counts. */
    if (previous)
        block_at(&index->blocks, previous)->tick = index->calls;
    domain_close(index, domain);
}

static void attach_all(Index *index, Attaching *attaching)
{
    while (attaching->chains.first) {
        Chain *chain = attaching->chains.first->chain;
        queue_cut(&attaching->chains, &chain->by_age);
        uint32_t slot = chain->slot, block = (uint32_t)chain->parent;
        Walk behind = {slot, chain->tier, chain->domain, chain->counted, chain->names, chain->contents,
                       chain->gone, chain->count, block, 0};
        walk(index, &behind, attaching);
        block_unpin(index, block);
        chain_free(index, chain);
        index->holders[slot].busy--;
        holder_release_if_idle(index, slot);
    }
}

static uint32_t resolve(const Index *index, uint32_t domain, uint32_t parent_domain, uint64_t name)
{
    const Domain *place = domain_find(index, domain);
    uint32_t block = place ? name_meaning(index, place, name) : 0;
    if (!block && parent_domain != domain && (place = domain_find(index, parent_domain)))
        block = name_meaning(index, place, name);
    return block;
}

static void store_by_name(Index *index, uint32_t slot, const Origin *origin, const uint64_t *names, size_t count,
                          Attaching *attaching)
{
    Domain *domain = domain_open(index, slot, origin->tier, origin->domain);
    for (size_t i = 0; i < count; i++) {
        uint32_t block = resolve(index, origin->domain, origin->parent_domain, names[i]);
        if (block)
            claim(index, slot, origin->tier, names[i], unmix(block_at(&index->blocks, block)->hash), origin->counted, 0,
                  attaching);
        else
            attaching->outcome.unknown++;
    }
    index->counters.unknown_names += attaching->outcome.unknown;
    domain_close(index, domain);
}

Stored index_stored(Index *index, const Origin *origin, const uint64_t *names, const uint64_t *contents, size_t count,
                    const uint64_t *parent, uint64_t root)
{
    Attaching attaching = {{NULL, NULL}, {0, 0, 0, 0, 0}};
    if (!count)
        return attaching.outcome;
    index->calls++;
    uint32_t previous = 0;
    if (contents && parent) {
        previous = resolve(index, origin->domain, origin->parent_domain, *parent);
        if (!previous) {
            bool fits;
            uint64_t lost = waiting_add(index, origin, names, contents, count, *parent, &fits);
            index->counters.evicted += lost;
            return (Stored){.waiting = fits ? count : 0, .refused = lost};
        }
    }
    uint32_t slot = holder_slot(index, origin->holder);
    index->holders[slot].busy++;
    if (contents) {
        Walk chain = {slot, origin->tier, origin->domain, origin->counted, names, contents, NULL, count, previous, root};
        walk(index, &chain, &attaching);
    } else {
        store_by_name(index, slot, origin, names, count, &attaching);
    }
    attach_all(index, &attaching);
    index->holders[slot].busy--;
    holder_release_if_idle(index, slot);
    return attaching.outcome;
}

static bool take_one_store(Index *index, uint32_t member, uint64_t name)
{
    uint64_t *repeats = pairs_find(&index->repeats, member, name);
    if (!repeats)
        return false;
    if (*repeats > 1)
        --*repeats;
    else
        pairs_remove(&index->repeats, member, name);
    return true;
}

uint64_t index_removed(Index *index, uint32_t holder, uint32_t tier, const uint64_t *names, size_t count)
{
    uint32_t slot;
    if (!holder_find(index, holder, &slot)) {
        index->counters.unknown_removals += count;
        return 0;
    }
    Holder *known = index->holders + slot;
    uint32_t member = member_of(slot, tier);
    uint64_t left = 0;
    known->busy++;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            table_prefetch(&index->names, mix(names[i + AHEAD]));
        Undone undone = waiting_undo(index, slot, tier, names[i]);
        if (undone == UNDONE_ONE_COUNTED)
            continue;
        Entry *entry = known->claims[tier] ? name_claimed(index, names[i], member) : NULL;
        if (entry) {
            if (!take_one_store(index, member, names[i]))
                left += release(index, slot, tier, entry);
        } else if (undone == UNDONE_NOTHING) {
            if (known->forgotten[tier]) {
                known->forgotten[tier]--;
                index->forgotten--;
            } else {
                index->counters.unknown_removals++;
            }
        }
    }
    known->busy--;
    holder_release_if_idle(index, slot);
    return left;
}
