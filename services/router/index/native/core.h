/* The prefix index of one space. The semantics are those of services/router/index/port.py, call by call.
 *
 *   names    engine hash -> block, claimed by a set of members
 *   keys     prefix key -> block, held by a set of members
 *   blocks   what both refer to
 *
 * A member is a tier and a holder's slot; sets of members are interned. A claim is a member in the set of a name's
 * entry. Engines that hash alike share their names' entries, whatever their number; a name under which claims disagree
 * has an entry per block. Rarities stand beside: `meanings` says what a name means in a domain whose own claims
 * disagree, `repeats` counts the stores of a claim beyond the first, `copies` the claims of a member on a block beyond
 * the first.
 *
 * Nothing here is locked; see module.c.
 */
#ifndef KVROUTE_CORE_H
#define KVROUTE_CORE_H

#include "blocks.h"
#include "pairs.h"
#include "sets.h"
#include "waiting.h"

enum { TIERS = 3, NPU = 0, CPU = 1, DISK = 2 };
#define SEVERAL UINT32_MAX

/* The engine hashes of one name space. names: distinct ones. shelves: (holder, tier) pairs that have claims here; slot:
 * of their holder, or SEVERAL. open: calls at work that need it. */
typedef struct {
    uint32_t number;
    uint32_t slot;
    uint32_t shelves;
    uint32_t open;
    uint64_t names;
} Domain;

/* A holder. domain: where its claims in a tier stand, meaningful as long as there are any. cursor: where clearing in
 * slices goes on. forgotten: claims that a limit took and the holder has not taken back since. */
typedef struct {
    uint32_t holder;
    bool used;
    Domain *domain[TIERS];
    uint64_t claims[TIERS];
    uint64_t blocks[TIERS];
    uint64_t forgotten[TIERS];
    Cursor cursor[TIERS];
    Queue waiting;
    uint64_t waiting_blocks;
    uint32_t busy; /* calls and chains at work that need the slot */
} Holder;

typedef struct {
    uint64_t evicted, unknown_names, unknown_removals, renamed;
} Counters;

typedef struct {
    Memory memory;
    Sets sets;
    Blocks blocks;
    Table keys;
    Table names;
    uint64_t held;        /* blocks that anybody holds */
    uint64_t memberships; /* (holder, tier, block) */
    uint64_t pool_memberships; /* those in other tiers than the NPU */
    uint64_t claims, name_count;
    Pairs meanings;       /* (domain, name) -> block, pinned */
    Pairs repeats;        /* (member, name) -> stores beyond the first */
    Pairs copies;         /* (member, block) -> claims beyond the first */
    Pairs holder_slots;   /* (0, holder) -> slot + 1 */
    Pairs domains;        /* (0, domain) -> Domain */
    Holder *holders;
    uint32_t holder_capacity, holders_used, free_holder;
    uint32_t slots_version; /* changes whenever a slot begins or ends to be a holder's */
    WaitingRoom room;
    uint64_t max_blocks;
    uint64_t key_mask;
    Counters counters;
    uint64_t forgotten; /* claims that a limit took, of all holders */
    uint32_t calls;
    struct {
        Cursor cursor;
        uint32_t horizon;
        bool running;
    } sweep;
} Index;

/* Outcome of a store, in blocks. */
typedef struct {
    uint64_t attached, repeated, waiting, unknown, refused;
} Stored;

/* Chains whose parent has just appeared, pinned there: they are attached within the same call. */
typedef struct {
    Queue chains;
    Stored outcome;
} Attaching;

typedef struct {
    uint32_t holder, tier, domain, parent_domain;
    bool counted;
} Origin;

void index_init(Index *index, uint64_t max_blocks, uint64_t max_waiting_blocks, uint32_t hash_bits);
void index_free(Index *index);

/* holders.c */
uint32_t holder_slot(Index *index, uint32_t holder);           /* makes one */
bool holder_find(const Index *index, uint32_t holder, uint32_t *slot);
void holder_release_if_idle(Index *index, uint32_t slot);
Domain *domain_find(const Index *index, uint32_t number);
/* The domain in which (slot, tier) claims: where it has claims already, else this one, made if need be. To be closed. */
Domain *domain_open(Index *index, uint32_t slot, uint32_t tier, uint32_t number);
void domain_close(Index *index, Domain *domain);

/* claims.c */
/* The block that a name means in a domain, 0 if none. */
uint32_t name_meaning(const Index *index, const Domain *domain, uint64_t name);
/* The entry of a name that this member claims, NULL if none. */
Entry *name_claimed(const Index *index, uint64_t name, uint32_t member);
/* Claim a block for (slot, tier) under a name; previous: the block before it, or 0. The block, 0 if it was refused. */
uint32_t claim(Index *index, uint32_t slot, uint32_t tier, uint64_t name, uint64_t key, bool counted, uint32_t previous,
               Attaching *attaching);
/* Drop a claim with all its stores; whether the holder no longer has the block. The entry is void afterwards. */
bool release(Index *index, uint32_t slot, uint32_t tier, Entry *entry);
/* Whether any claim in this set is in this domain. */
bool domain_has(const Index *index, const Domain *domain, uint32_t set);
/* Let a name, which has claims in this domain, mean this block there. */
void change_meaning(Index *index, const Domain *domain, uint64_t name, uint32_t block);
uint32_t block_of_key(const Index *index, uint64_t key);
void block_pin(Index *index, uint32_t block);
void block_unpin(Index *index, uint32_t block);

/* waiting.c */
/* Let a chain wait; 0, or the number of blocks that were lost for it (its own, with *fits false, if it is too large). */
uint64_t waiting_add(Index *index, const Origin *origin, const uint64_t *names, const uint64_t *contents, size_t count,
                     uint64_t parent, bool *fits);
/* Take a chain out of the room, to be attached or to be freed. */
void waiting_detach(Index *index, Chain *chain);
void chain_free(Index *index, Chain *chain);
/* Undo waiting stores of a block: every one that is not counted, or else the oldest counted one. */
Undone waiting_undo(Index *index, uint32_t slot, uint32_t tier, uint64_t name);
void waiting_clear(Index *index, uint32_t slot, const bool *tiers);
/* Take blocks of a chain for removed, as in a snapshot. */
void waiting_mark_gone(Index *index, Chain *chain, const uint8_t *gone);

/* store.c */
/* `contents` NULL: blocks are taken by name. parent NULL: the chain begins at root. */
Stored index_stored(Index *index, const Origin *origin, const uint64_t *names, const uint64_t *contents, size_t count,
                    const uint64_t *parent, uint64_t root);
uint64_t index_removed(Index *index, uint32_t holder, uint32_t tier, const uint64_t *names, size_t count);
uint64_t index_cleared(Index *index, uint32_t holder, const bool *tiers);
bool index_clear_some(Index *index, uint32_t holder, const bool *tiers, uint64_t limit);
/* Forget the oldest blocks that nothing follows, at most about `limit` claims, until `bytes` are enough; whether there
 * is more to do. */
bool index_shrink(Index *index, uint64_t bytes, uint64_t limit);

uint64_t key_after(const Index *index, uint64_t previous, uint64_t content);
uint64_t key_first(const Index *index, uint64_t root, uint64_t content);

#endif
