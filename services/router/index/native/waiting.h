/* The room for chains whose parent has no name yet: bounded, the oldest leave first, never taken for roots. */
#ifndef KVROUTE_WAITING_H
#define KVROUTE_WAITING_H

#include "pairs.h"

typedef struct Chain Chain;

/* A place in a queue: the chain, and for queues of names the name and how often the chain carries it. */
typedef struct Link {
    struct Link *before, *after;
    Chain *chain;
    uint64_t name;
    uint32_t places, first;
} Link;

typedef struct {
    Link *first, *last;
} Queue;

/* gone[i]: that block was removed while it waited. live: blocks that are left. */
struct Chain {
    uint32_t slot, tier;
    uint32_t domain, parent_domain;
    bool counted;
    uint64_t parent;
    uint32_t count, live, links;
    uint64_t *names, *contents;
    uint8_t *gone;
    Link *by_name;
    Link by_parent[2], by_age, by_holder;
    uint32_t parents;
};

typedef struct {
    Memory *memory;
    uint64_t max_blocks, blocks;
    Queue by_age;
    Pairs by_parent; /* (domain, parent) -> Queue */
    Pairs by_name;   /* (member, name) -> Queue */
} WaitingRoom;

typedef enum { UNDONE_NOTHING, UNDONE_UNCOUNTED, UNDONE_ONE_COUNTED } Undone;

void queue_append(Queue *queue, Link *link);
void queue_cut(Queue *queue, Link *link);

void waiting_init(WaitingRoom *room, Memory *memory, uint64_t max_blocks);
void waiting_free(WaitingRoom *room);
/* The chains that wait for this name, NULL if none. */
Queue *waiting_for(const WaitingRoom *room, uint32_t domain, uint64_t name);

#endif
