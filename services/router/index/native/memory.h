/* Memory that is counted, so that an index knows how many bytes it uses. */
#ifndef KVROUTE_MEMORY_H
#define KVROUTE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* bytes: what is allocated at the moment, with the allocator's overhead estimated. */
typedef struct {
    uint64_t bytes;
} Memory;

/* Zeroed memory. Ends the process when there is none: an index that is half changed must not go on. */
void *memory_take(Memory *memory, size_t size);
void memory_give(Memory *memory, void *at, size_t size);
/* What is new is zeroed. */
void *memory_resize(Memory *memory, void *at, size_t size, size_t new_size);

#endif
