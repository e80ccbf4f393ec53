/* The index in bytes, and the recount of everything it counts. */
#ifndef KVROUTE_SNAPSHOT_H
#define KVROUTE_SNAPSHOT_H

#include "core.h"

/* A growing buffer, from malloc. */
typedef struct {
    uint8_t *data;
    size_t length, capacity;
} Bytes;

/* Append the index in the form of services/router/index/snapshots.py. */
void snapshot(const Index *index, Bytes *bytes);
/* Fill an empty index; NULL, or what is wrong with the snapshot: the index is empty then. */
const char *restore(Index *index, const uint8_t *data, size_t length);

enum { MAX_VIOLATIONS = 20 };

typedef struct {
    int count;
    char texts[MAX_VIOLATIONS][160];
} Violations;

/* Recompute every invariant. */
void audit(const Index *index, Violations *violations);

#endif
