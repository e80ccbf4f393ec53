#include "core.h"

#include <string.h>

bool holder_find(const Index *index, uint32_t holder, uint32_t *slot)
{
    uint64_t *known = pairs_find(&index->holder_slots, 0, holder);
    if (known)
        *slot = (uint32_t)*known - 1;
    return known != NULL;
}

uint32_t holder_slot(Index *index, uint32_t holder)
{
    uint32_t slot;
    if (holder_find(index, holder, &slot))
        return slot;
    for (slot = index->free_holder; slot < index->holders_used && index->holders[slot].used; slot++)
        ;
    index->free_holder = slot + 1;
    if (slot >= index->holder_capacity) {
        uint32_t capacity = index->holder_capacity ? 2 * index->holder_capacity : 16;
        index->holders = memory_resize(&index->memory, index->holders, index->holder_capacity * sizeof(Holder),
                                       capacity * sizeof(Holder));
        index->holder_capacity = capacity;
    }
    if (slot >= index->holders_used)
        index->holders_used = slot + 1;
    memset(index->holders + slot, 0, sizeof(Holder));
    index->holders[slot].holder = holder;
    index->holders[slot].used = true;
    pairs_put(&index->holder_slots, 0, holder, (uint64_t)slot + 1);
    index->slots_version++;
    return slot;
}

void holder_release_if_idle(Index *index, uint32_t slot)
{
    Holder *holder = index->holders + slot;
    if (holder->busy || holder->waiting_blocks || holder->claims[NPU] || holder->claims[CPU] || holder->claims[DISK])
        return;
    for (uint32_t tier = 0; tier < TIERS; tier++)
        index->forgotten -= holder->forgotten[tier];
    pairs_remove(&index->holder_slots, 0, holder->holder);
    holder->used = false;
    if (slot < index->free_holder)
        index->free_holder = slot;
    index->slots_version++;
}

Domain *domain_find(const Index *index, uint32_t number)
{
    uint64_t *known = pairs_find(&index->domains, 0, number);
    return known ? (Domain *)(uintptr_t)*known : NULL;
}

Domain *domain_open(Index *index, uint32_t slot, uint32_t tier, uint32_t number)
{
    Holder *holder = index->holders + slot;
    if (!holder->claims[tier]) {
        Domain *domain = domain_find(index, number);
        if (!domain) {
            domain = memory_take(&index->memory, sizeof(Domain));
            domain->number = number;
            pairs_put(&index->domains, 0, number, (uint64_t)(uintptr_t)domain);
        }
        holder->domain[tier] = domain;
    }
    holder->domain[tier]->open++;
    return holder->domain[tier];
}

void domain_close(Index *index, Domain *domain)
{
    if (--domain->open || domain->shelves)
        return;
    pairs_remove(&index->domains, 0, domain->number);
    memory_give(&index->memory, domain, sizeof(Domain));
}

void index_init(Index *index, uint64_t max_blocks, uint64_t max_waiting_blocks, uint32_t hash_bits)
{
    memset(index, 0, sizeof *index);
    Memory *memory = &index->memory;
    index->key_mask = hash_bits >= 64 ? UINT64_MAX : (1ULL << hash_bits) - 1;
    index->max_blocks = max_blocks;
    sets_init(&index->sets, memory, index->key_mask);
    blocks_init(&index->blocks, memory);
    table_init(&index->keys, memory);
    pairs_init(&index->repeats, memory);
    pairs_init(&index->copies, memory);
    pairs_init(&index->holder_slots, memory);
    pairs_init(&index->domains, memory);
    pairs_init(&index->meanings, memory);
    table_init(&index->names, memory);
    waiting_init(&index->room, memory, max_waiting_blocks);
    index->slots_version = 1;
}

void index_free(Index *index)
{
    while (index->room.by_age.first) {
        Chain *chain = index->room.by_age.first->chain;
        waiting_detach(index, chain);
        chain_free(index, chain);
    }
    waiting_free(&index->room);
    uint64_t place = 0;
    for (const Pair *pair; (pair = pairs_next(&index->domains, &place));)
        memory_give(&index->memory, (Domain *)(uintptr_t)pair->value, sizeof(Domain));
    memory_give(&index->memory, index->holders, index->holder_capacity * sizeof(Holder));
    pairs_free(&index->repeats);
    pairs_free(&index->copies);
    pairs_free(&index->holder_slots);
    pairs_free(&index->domains);
    pairs_free(&index->meanings);
    table_free(&index->names);
    table_free(&index->keys);
    blocks_free(&index->blocks);
    sets_free(&index->sets);
}
