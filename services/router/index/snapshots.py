"""The binary form of an index snapshot, version 1: little-endian, everything in units of 8 bytes.

========== ==================================================================================================
part       content
========== ==================================================================================================
head       magic ``KVRINDEX``; version u64; evicted, unknown_names, unknown_removals, renamed, u64 each
blocks     count; per block: key u64, key of the block it follows u64, has one u32, tick u32 (may be left out: count 0)
shelves    count; per holder and tier with claims: holder u32, tier u32, domain u64
sets       count; per set: size u64; per member: holder u32, tier u32
names      count; per engine hash and block: engine hash u64, key u64, claimed by set number u64 (counted from 1)
meanings   count; where claims of one domain disagree, what was said last: domain u64, engine hash u64, key u64
repeats    count; per claim: holder u32, tier u32, engine hash u64, stores beyond the first u64
waiting    count; per chain: holder u32, tier u32, domain u32, parent_domain u32, counted u32, blocks u32, parent u64,
           engine hashes, content hashes (u64 each), removed meanwhile (one byte per block, filled up to 8)
check      XXH3-64, seed 1337, of everything before
========== ==================================================================================================
"""

MAGIC = b"KVRINDEX"
VERSION = 1
CHECK_SEED = 1337
