/* Token ids out of a JSON object, without an object per token. */
#ifndef KVROUTE_JSON_TOKENS_H
#define KVROUTE_JSON_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where the array stands: from behind its [ to its ]. count: of its numbers. */
typedef struct {
    size_t start, end, count;
} TokenArray;

/* Find the top-level member `name` whose value is an array, in one pass; false where there is none, where there are
 * several, or where the text is not as plain as it usually is: then whoever reads JSON in full has to see to it. */
bool json_find_array(const char *text, size_t length, const char *name, size_t name_length, TokenArray *array);

/* Read the integers of the array; values outside u32 wrap as a C cast would. False for anything but integers of at most
 * 18 digits between commas. tokens has room for as many numbers as the array has bytes / 2 + 1. */
bool json_read_tokens(const char *text, TokenArray *array, uint32_t *tokens);

#endif
