/* Random calls to the compiled index without Python, to be built with sanitizers: index_fuzz SECONDS [SEED].
 *
 * Numbers are drawn from small ranges, so that holders, domains, names and blocks meet in every way; every rule of the
 * callers is broken. The audit must find nothing; a damaged snapshot must be refused or come out sound.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "match.h"
#include "snapshot.h"

enum { MOST = 40, HOLDERS = 7, CHECK_SEED = 1337 };

static uint64_t state;

static uint64_t draw(uint64_t most)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return most ? state % most : state;
}

static void check(const Index *index, const char *after)
{
    Violations violations = {0};
    audit(index, &violations);
    for (int i = 0; i < violations.count; i++)
        fprintf(stderr, "after %s: %s\n", after, violations.texts[i]);
    if (violations.count)
        abort();
}

static void store_or_remove(Index *index)
{
    uint64_t names[MOST], contents[MOST], parent = draw(12);
    size_t count = draw(10) ? draw(6) : draw(MOST);
    for (size_t i = 0; i < count; i++) {
        names[i] = draw(12);
        contents[i] = draw(3);
    }
    uint32_t holder = (uint32_t)draw(HOLDERS), tier = (uint32_t)draw(TIERS);
    if (draw(3)) {
        Origin origin = {holder, tier, (uint32_t)draw(4), (uint32_t)draw(4), draw(2)};
        index_stored(index, &origin, names, draw(8) ? contents : NULL, count, draw(2) ? &parent : NULL, draw(2) * 5);
    } else {
        index_removed(index, holder, tier, names, count);
    }
}

static void clear_or_shrink(Index *index)
{
    bool tiers[TIERS] = {draw(2), draw(2), draw(2)};
    uint32_t holder = (uint32_t)draw(HOLDERS);
    if (draw(3) == 0)
        index_cleared(index, holder, tiers);
    else if (draw(2))
        index_clear_some(index, holder, tiers, draw(5));
    else
        index_shrink(index, draw(20000), draw(8));
}

static void ask(const Index *index)
{
    uint64_t keys[MOST];
    uint32_t holders[HOLDERS], locals[HOLDERS], ends[HOLDERS], pools[HOLDERS], slots[3][HOLDERS];
    uint8_t contents[8 * MOST];
    Coverage coverages[HOLDERS];
    for (int i = 0; i < HOLDERS; i++) {
        holders[i] = (uint32_t)draw(HOLDERS + 2);
        locals[i] = (uint32_t)draw(HOLDERS);
        ends[i] = (uint32_t)i + 1;
        pools[i] = (uint32_t)draw(HOLDERS);
    }
    Candidates candidates = {.count = HOLDERS, .local_count = HOLDERS, .pool_count = HOLDERS, .holders = holders,
                             .locals = locals, .local_ends = ends, .pools = pools, .slots = slots[0],
                             .local_slots = slots[1], .pool_slots = slots[2]};
    candidates_resolve(&candidates, index);
    memset(contents, 0, sizeof contents);
    KeySource source = {.keys = keys, .count = draw(MOST), .contents = contents, .root = draw(2) * 5,
                        .mask = index->key_mask};
    for (size_t i = 0; i < source.count; i++)
        contents[8 * i] = (uint8_t)draw(3);
    source.seed.seed = CHECK_SEED;
    Scratch scratch = {0};
    match(index, &source, &candidates, coverages, &scratch);
    scratch_free(&scratch);
    for (int i = 0; i < HOLDERS; i++) {
        const Coverage *c = coverages + i;
        if (c->npu + c->cpu_local + c->cpu_remote + c->disk_local + c->disk_remote > source.count)
            abort();
    }
}

static void save_and_restore(Index *index, uint64_t max_blocks, uint64_t max_waiting)
{
    Bytes bytes = {0};
    snapshot(index, &bytes);
    Index copy;
    index_init(&copy, max_blocks, max_waiting, 64);
    if (restore(&copy, bytes.data, bytes.length))
        abort();
    check(&copy, "restore");
    if (copy.claims != index->claims || copy.room.blocks != index->room.blocks || copy.held != index->held)
        abort();
    index_free(&copy);
    for (int damage = 0; damage < 3; damage++) {
        size_t length = draw(4) ? bytes.length : 8 * draw(bytes.length / 8 + 1);
        uint8_t *data = malloc(length + 8);
        memcpy(data, bytes.data, length);
        for (uint64_t changes = draw(4); changes && length > 24; changes--)
            data[16 + draw(length - 24)] = (uint8_t)draw(draw(2) ? 4 : 256);
        if (length >= 8) {
            Xxh3Seed seed;
            xxh3_seed(&seed, CHECK_SEED);
            uint64_t sum = xxh3_64(&seed, data, length - 8);
            memcpy(data + length - 8, &sum, 8);
        }
        index_init(&copy, max_blocks, max_waiting, 64);
        restore(&copy, data, length);
        for (int i = 0; i < 20; i++)
            store_or_remove(&copy);
        ask(&copy);
        index_free(&copy);
        if (copy.memory.bytes)
            abort();
        free(data);
    }
    free(bytes.data);
}

int main(int count, char **arguments)
{
    double seconds = count > 1 ? atof(arguments[1]) : 5;
    uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : (uint64_t)time(NULL), steps = 0;
    clock_t until = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
    for (; clock() < until; seed++) {
        state = seed * 2654435761U + 88172645463325252ULL;
        printf("seed %llu\n", (unsigned long long)seed);
        uint64_t max_blocks = draw(2) ? 9 : UINT64_MAX, max_waiting = draw(2) ? 7 : 100000;
        Index index;
        index_init(&index, max_blocks, max_waiting, draw(4) ? 64 : 4);
        for (int step = 0; step < 1500; step++, steps++) {
            uint64_t kind = draw(100);
            if (kind < 80)
                store_or_remove(&index);
            else if (kind < 88)
                clear_or_shrink(&index);
            else if (kind < 98)
                ask(&index);
            else if (index.key_mask == UINT64_MAX)
                save_and_restore(&index, max_blocks, max_waiting);
            check(&index, "a step");
        }
        index_free(&index);
        if (index.memory.bytes)
            abort();
    }
    printf("%llu steps\n", (unsigned long long)steps);
    return 0;
}
