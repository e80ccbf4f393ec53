/* What of a query each worker can use (Coverage in services/router/index/port.py). */
#ifndef KVROUTE_MATCH_H
#define KVROUTE_MATCH_H

#include "../../../../schemas/native/block_hashes.h"
#include "core.h"

/* Workers to answer for. locals of candidate i: locals[local_ends[i - 1]] to locals[local_ends[i] - 1], holder numbers
 * as everywhere here. pools: every location that all of them can reach. */
typedef struct {
    uint32_t count, local_count, pool_count;
    uint32_t *holders, *locals, *local_ends, *pools;
    /* Their slots, as of `version` of the index's slots. */
    uint32_t version;
    uint32_t *slots, *local_slots, *pool_slots;
} Candidates;

enum { NOBODY = UINT32_MAX };

/* Blocks per candidate. */
typedef struct {
    uint32_t npu, cpu_local, cpu_remote, disk_local, disk_remote;
} Coverage;

/* Memory of one call at a time, kept for the next. stamps: never above `stamp`, so they need no clearing. */
typedef struct {
    uint32_t *words, *stamps;
    size_t capacity, stamp_capacity;
    uint32_t stamp;
} Scratch;

static inline bool candidates_are_resolved(const Candidates *candidates, const Index *index)
{
    return __atomic_load_n(&candidates->version, __ATOMIC_ACQUIRE) == index->slots_version;
}

/* Look up the slots; not for several threads at once. */
void candidates_resolve(Candidates *candidates, const Index *index);

/* Candidates must be resolved. */
void match(const Index *index, KeySource *keys, const Candidates *candidates, Coverage *coverages, Scratch *scratch);
void scratch_free(Scratch *scratch);

#endif
