/* XXH3-64 with a seed, after the public specification (xxHash specification, version 0.2.0). */
#ifndef KVROUTE_XXH3_H
#define KVROUTE_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH3_SECRET_SIZE 192

/* What a seed makes of the default secret; needed for inputs longer than 240 bytes. */
typedef struct {
    uint64_t seed;
    uint8_t secret[XXH3_SECRET_SIZE];
} Xxh3Seed;

void xxh3_seed(Xxh3Seed *seeded, uint64_t seed);
uint64_t xxh3_64(const Xxh3Seed *seeded, const void *input, size_t length);

/* The hash of 16 bytes: two little-endian u64 values. */
uint64_t xxh3_64_pair(uint64_t seed, uint64_t first, uint64_t second);

#endif
