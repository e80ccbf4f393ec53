#include "xxh3.h"

#include <string.h>

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL
#define PRIME_MX2 0x9FB21C651E98DF25ULL

#define STRIPE 64
#define STRIPES_PER_BLOCK ((XXH3_SECRET_SIZE - STRIPE) / 8)

static const uint8_t DEFAULT_SECRET[XXH3_SECRET_SIZE] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b,
    0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0,
    0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3,
    0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3,
    0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1,
    0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40,
    0x7e,
};

static inline uint64_t swap64(uint64_t value) { return __builtin_bswap64(value); }

static inline uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = swap64(value);
#endif
    return value;
}

static inline uint32_t read32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    return value;
}

static inline uint64_t rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

static inline uint64_t multiply_fold(uint64_t left, uint64_t right)
{
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ (hash >> 32);
}

static inline uint64_t avalanche_short(uint64_t hash)
{
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ (hash >> 32);
}

static inline uint64_t mix16(const uint8_t *input, size_t secret, uint64_t seed)
{
    uint64_t low = read64(input) ^ (read64(DEFAULT_SECRET + secret) + seed);
    uint64_t high = read64(input + 8) ^ (read64(DEFAULT_SECRET + secret + 8) - seed);
    return multiply_fold(low, high);
}

static inline uint64_t hash_9_to_16(uint64_t seed, uint64_t first, uint64_t last, size_t length)
{
    uint64_t low = first ^ ((read64(DEFAULT_SECRET + 24) ^ read64(DEFAULT_SECRET + 32)) + seed);
    uint64_t high = last ^ ((read64(DEFAULT_SECRET + 40) ^ read64(DEFAULT_SECRET + 48)) - seed);
    return avalanche(length + swap64(low) + high + multiply_fold(low, high));
}

static uint64_t hash_to_16(uint64_t seed, const uint8_t *input, size_t length)
{
    if (length > 8)
        return hash_9_to_16(seed, read64(input), read64(input + length - 8), length);
    if (length >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t value = read32(input + length - 4) + ((uint64_t)read32(input) << 32);
        uint64_t hash = value ^ ((read64(DEFAULT_SECRET + 8) ^ read64(DEFAULT_SECRET + 16)) - seed);
        hash ^= rotate(hash, 49) ^ rotate(hash, 24);
        hash *= PRIME_MX2;
        hash ^= (hash >> 35) + length;
        hash *= PRIME_MX2;
        return hash ^ (hash >> 28);
    }
    if (length) {
        uint32_t value = ((uint32_t)input[0] << 16) | ((uint32_t)input[length >> 1] << 24) | input[length - 1]
                         | ((uint32_t)length << 8);
        return avalanche_short(value ^ ((uint64_t)(read32(DEFAULT_SECRET) ^ read32(DEFAULT_SECRET + 4)) + seed));
    }
    return avalanche_short(seed ^ read64(DEFAULT_SECRET + 56) ^ read64(DEFAULT_SECRET + 64));
}

static inline uint64_t hash_17_to_128(uint64_t seed, const uint8_t *input, size_t length)
{
    uint64_t sum = length * PRIME64_1;
    for (size_t i = (length - 1) / 32 + 1; i-- > 0;) {
        sum += mix16(input + 16 * i, 32 * i, seed);
        sum += mix16(input + length - 16 * (i + 1), 32 * i + 16, seed);
    }
    return avalanche(sum);
}

static uint64_t hash_129_to_240(uint64_t seed, const uint8_t *input, size_t length)
{
    uint64_t sum = length * PRIME64_1;
    size_t rounds = length / 16;
    for (size_t i = 0; i < 8; i++)
        sum += mix16(input + 16 * i, 16 * i, seed);
    sum = avalanche(sum);
    for (size_t i = 8; i < rounds; i++)
        sum += mix16(input + 16 * i, 16 * (i - 8) + 3, seed);
    return avalanche(sum + mix16(input + length - 16, 136 - 17, seed));
}

static inline void accumulate(uint64_t *lanes, const uint8_t *input, const uint8_t *secret)
{
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(input + 8 * i);
        uint64_t keyed = value ^ read64(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static uint64_t hash_long(const uint8_t *secret, const uint8_t *input, size_t length)
{
    uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const size_t block = STRIPE * STRIPES_PER_BLOCK;
    size_t blocks = (length - 1) / block;
    for (size_t n = 0; n < blocks; n++) {
        for (size_t stripe = 0; stripe < STRIPES_PER_BLOCK; stripe++)
            accumulate(lanes, input + n * block + stripe * STRIPE, secret + 8 * stripe);
        for (int i = 0; i < 8; i++) {
            lanes[i] ^= lanes[i] >> 47;
            lanes[i] ^= read64(secret + XXH3_SECRET_SIZE - STRIPE + 8 * i);
            lanes[i] *= PRIME32_1;
        }
    }
    size_t stripes = (length - 1 - block * blocks) / STRIPE;
    for (size_t stripe = 0; stripe < stripes; stripe++)
        accumulate(lanes, input + blocks * block + stripe * STRIPE, secret + 8 * stripe);
    accumulate(lanes, input + length - STRIPE, secret + XXH3_SECRET_SIZE - STRIPE - 7);
    uint64_t sum = length * PRIME64_1;
    for (int i = 0; i < 4; i++)
        sum += multiply_fold(
            lanes[2 * i] ^ read64(secret + 11 + 16 * i), lanes[2 * i + 1] ^ read64(secret + 11 + 16 * i + 8));
    return avalanche(sum);
}

void xxh3_seed(Xxh3Seed *seeded, uint64_t seed)
{
    seeded->seed = seed;
    for (int i = 0; i < XXH3_SECRET_SIZE; i += 16) {
        uint64_t low = read64(DEFAULT_SECRET + i) + seed;
        uint64_t high = read64(DEFAULT_SECRET + i + 8) - seed;
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        low = swap64(low);
        high = swap64(high);
#endif
        memcpy(seeded->secret + i, &low, 8);
        memcpy(seeded->secret + i + 8, &high, 8);
    }
}

uint64_t xxh3_64(const Xxh3Seed *seeded, const void *input, size_t length)
{
    if (length <= 16)
        return hash_to_16(seeded->seed, input, length);
    if (length <= 128)
        return hash_17_to_128(seeded->seed, input, length);
    if (length <= 240)
        return hash_129_to_240(seeded->seed, input, length);
    return hash_long(seeded->secret, input, length);
}

uint64_t xxh3_64_pair(uint64_t seed, uint64_t first, uint64_t second)
{
    return hash_9_to_16(seed, first, second, 16);
}
