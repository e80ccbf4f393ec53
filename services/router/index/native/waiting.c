#include "core.h"

#include <string.h>

void queue_append(Queue *queue, Link *link)
{
    link->before = queue->last;
    link->after = NULL;
    if (queue->last)
        queue->last->after = link;
    else
        queue->first = link;
    queue->last = link;
}

void queue_cut(Queue *queue, Link *link)
{
    if (link->before)
        link->before->after = link->after;
    else
        queue->first = link->after;
    if (link->after)
        link->after->before = link->before;
    else
        queue->last = link->before;
}

void waiting_init(WaitingRoom *room, Memory *memory, uint64_t max_blocks)
{
    *room = (WaitingRoom){.memory = memory, .max_blocks = max_blocks};
    pairs_init(&room->by_parent, memory);
    pairs_init(&room->by_name, memory);
}

void waiting_free(WaitingRoom *room)
{
    pairs_free(&room->by_parent);
    pairs_free(&room->by_name);
}

static Queue *queue_of(const Pairs *pairs, uint32_t first, uint64_t second)
{
    uint64_t *known = pairs_find(pairs, first, second);
    return known ? (Queue *)(uintptr_t)*known : NULL;
}

Queue *waiting_for(const WaitingRoom *room, uint32_t domain, uint64_t name)
{
    return queue_of(&room->by_parent, domain, name);
}

static Queue *queue_make(WaitingRoom *room, Pairs *pairs, uint32_t first, uint64_t second)
{
    Queue *queue = queue_of(pairs, first, second);
    if (!queue) {
        queue = memory_take(room->memory, sizeof(Queue));
        pairs_put(pairs, first, second, (uint64_t)(uintptr_t)queue);
    }
    return queue;
}

static void cut(WaitingRoom *room, Pairs *pairs, uint32_t first, uint64_t second, Link *link)
{
    Queue *queue = queue_of(pairs, first, second);
    queue_cut(queue, link);
    if (!queue->first) {
        pairs_remove(pairs, first, second);
        memory_give(room->memory, queue, sizeof(Queue));
    }
}

static Chain *chain_make(Index *index, const Origin *origin, const uint64_t *names, const uint64_t *contents,
                         uint32_t count, uint64_t parent)
{
    Memory *memory = &index->memory;
    Chain *chain = memory_take(memory, sizeof(Chain));
    chain->slot = holder_slot(index, origin->holder);
    chain->tier = origin->tier;
    chain->domain = origin->domain;
    chain->parent_domain = origin->parent_domain;
    chain->counted = origin->counted;
    chain->parent = parent;
    chain->count = chain->live = count;
    chain->names = memory_take(memory, count * sizeof(uint64_t));
    chain->contents = memory_take(memory, count * sizeof(uint64_t));
    memcpy(chain->names, names, count * sizeof(uint64_t));
    memcpy(chain->contents, contents, count * sizeof(uint64_t));
    chain->gone = memory_take(memory, count);
    chain->by_name = memory_take(memory, count * sizeof(Link));
    return chain;
}

void chain_free(Index *index, Chain *chain)
{
    Memory *memory = &index->memory;
    memory_give(memory, chain->names, chain->count * sizeof(uint64_t));
    memory_give(memory, chain->contents, chain->count * sizeof(uint64_t));
    memory_give(memory, chain->gone, chain->count);
    memory_give(memory, chain->by_name, chain->count * sizeof(Link));
    memory_give(memory, chain, sizeof(Chain));
}

static void resize(Index *index, Chain *chain, int64_t change)
{
    index->room.blocks += (uint64_t)change;
    index->holders[chain->slot].waiting_blocks += (uint64_t)change;
}

static void forget(Index *index, Chain *chain)
{
    uint32_t slot = chain->slot;
    waiting_detach(index, chain);
    chain_free(index, chain);
    holder_release_if_idle(index, slot);
}

uint64_t waiting_add(Index *index, const Origin *origin, const uint64_t *names, const uint64_t *contents, size_t count,
                     uint64_t parent, bool *fits)
{
    WaitingRoom *room = &index->room;
    *fits = count <= room->max_blocks && count <= UINT32_MAX;
    if (!*fits)
        return count;
    uint64_t lost = 0;
    while (room->blocks + count > room->max_blocks) {
        lost += room->by_age.first->chain->live;
        forget(index, room->by_age.first->chain);
    }
    Chain *chain = chain_make(index, origin, names, contents, (uint32_t)count, parent);
    uint32_t member = member_of(chain->slot, chain->tier);
    queue_append(&room->by_age, &chain->by_age);
    queue_append(&index->holders[chain->slot].waiting, &chain->by_holder);
    chain->by_age.chain = chain->by_holder.chain = chain;
    chain->parents = chain->domain == chain->parent_domain ? 1 : 2;
    for (uint32_t i = 0; i < chain->parents; i++) {
        chain->by_parent[i].chain = chain;
        queue_append(queue_make(room, &room->by_parent, i ? chain->parent_domain : chain->domain, parent),
                     chain->by_parent + i);
    }
    for (uint32_t i = 0; i < chain->count; i++) {
        Queue *queue = queue_make(room, &room->by_name, member, names[i]);
        if (queue->last && queue->last->chain == chain) {
            queue->last->places++;
            continue;
        }
        Link *link = chain->by_name + chain->links++;
        *link = (Link){.chain = chain, .name = names[i], .places = 1, .first = i};
        queue_append(queue, link);
    }
    resize(index, chain, (int64_t)count);
    return lost;
}

void waiting_detach(Index *index, Chain *chain)
{
    WaitingRoom *room = &index->room;
    queue_cut(&room->by_age, &chain->by_age);
    queue_cut(&index->holders[chain->slot].waiting, &chain->by_holder);
    for (uint32_t i = 0; i < chain->parents; i++)
        cut(room, &room->by_parent, i ? chain->parent_domain : chain->domain, chain->parent, chain->by_parent + i);
    for (uint32_t i = 0; i < chain->links; i++)
        if (chain->by_name[i].places)
            cut(room, &room->by_name, member_of(chain->slot, chain->tier), chain->by_name[i].name, chain->by_name + i);
    resize(index, chain, -(int64_t)chain->live);
}

static void lose(Index *index, Link *link, uint32_t member)
{
    Chain *chain = link->chain;
    uint32_t left = link->places;
    for (uint32_t i = link->first; left; i++)
        if (chain->names[i] == link->name) {
            chain->gone[i] = 1;
            left--;
        }
    resize(index, chain, -(int64_t)link->places);
    chain->live -= link->places;
    cut(&index->room, &index->room.by_name, member, link->name, link);
    link->places = 0;
    if (!chain->live)
        forget(index, chain);
}

Undone waiting_undo(Index *index, uint32_t slot, uint32_t tier, uint64_t name)
{
    if (!index->holders[slot].waiting_blocks)
        return UNDONE_NOTHING;
    uint32_t member = member_of(slot, tier);
    Queue *queue = queue_of(&index->room.by_name, member, name);
    if (!queue)
        return UNDONE_NOTHING;
    bool uncounted = false;
    for (Link *link = queue->first, *after; link; link = after) {
        after = link->after;
        if (!link->chain->counted) {
            uncounted = true;
            /* The queue itself goes with its last link, and `after` is NULL then. */
            lose(index, link, member);
        }
    }
    if (uncounted)
        return UNDONE_UNCOUNTED;
    lose(index, queue->first, member);
    return UNDONE_ONE_COUNTED;
}

void waiting_clear(Index *index, uint32_t slot, const bool *tiers)
{
    for (Link *link = index->holders[slot].waiting.first, *after; link; link = after) {
        after = link->after;
        if (tiers[link->chain->tier])
            forget(index, link->chain);
    }
}

void waiting_mark_gone(Index *index, Chain *chain, const uint8_t *gone)
{
    uint32_t member = member_of(chain->slot, chain->tier), live = 0;
    for (uint32_t i = 0; i < chain->count; i++)
        live += !gone[i];
    for (uint32_t i = 0, links = chain->links; live && i < links; i++)
        if (chain->by_name[i].places && gone[chain->by_name[i].first])
            lose(index, chain->by_name + i, member);
}
