#include "json_tokens.h"

#include <string.h>

enum { MOST_DIGITS = 18 };

static size_t skip_space(const char *text, size_t at, size_t length)
{
    while (at < length && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t'))
        at++;
    return at;
}

/* Behind the string that begins at the quote `at`; the text's end if it does not end. */
static size_t skip_string(const char *text, size_t at, size_t length, bool *escaped)
{
    for (at++; at < length && text[at] != '"'; at++)
        if (text[at] == '\\') {
            *escaped = true;
            at++;
        }
    return at < length ? at + 1 : length;
}

/* Behind the value that begins here: at the comma or bracket that follows it. */
static size_t skip_value(const char *text, size_t at, size_t length)
{
    size_t depth = 0;
    bool escaped;
    while (at < length) {
        char c = text[at];
        if (c == '"') {
            at = skip_string(text, at, length, &escaped);
            continue;
        }
        if (c == '[' || c == '{')
            depth++;
        else if (c == ']' || c == '}') {
            if (!depth)
                return at;
            depth--;
        } else if (c == ',' && !depth) {
            return at;
        }
        at++;
    }
    return length;
}

bool json_find_array(const char *text, size_t length, const char *name, size_t name_length, TokenArray *array)
{
    bool found = false;
    size_t at = skip_space(text, 0, length);
    if (at >= length || text[at] != '{')
        return false;
    do {
        bool escaped = false;
        at = skip_space(text, at + 1, length);
        if (at >= length || text[at] != '"')
            return false;
        size_t key = at + 1;
        at = skip_string(text, at, length, &escaped);
        if (escaped || at >= length)
            return false;
        bool wanted = at - 1 - key == name_length && !memcmp(text + key, name, name_length);
        at = skip_space(text, at, length);
        if (at >= length || text[at] != ':')
            return false;
        at = skip_space(text, at + 1, length);
        if (at >= length)
            return false;
        if (wanted) {
            /* A member that comes twice is for the reader that knows which one counts. */
            if (found || text[at] != '[')
                return false;
            const char *close = memchr(text + at, ']', length - at);
            if (!close)
                return false;
            found = true;
            *array = (TokenArray){at + 1, (size_t)(close - text), 0};
            at = array->end + 1;
        }
        at = skip_value(text, at, length);
    } while (at < length && text[at] == ',');
    return found;
}

bool json_read_tokens(const char *text, TokenArray *array, uint32_t *tokens)
{
    size_t end = array->end, at = skip_space(text, array->start, end), count = 0;
    if (at == end)
        return true;
    for (;;) {
        bool negative = text[at] == '-';
        at += negative;
        size_t first = at;
        uint64_t value = 0;
        /* The bracket at `end` is no digit, so this stops there. */
        for (; text[at] >= '0' && text[at] <= '9'; at++)
            value = value * 10 + (uint64_t)(text[at] - '0');
        if (at == first || at - first > MOST_DIGITS || (text[first] == '0' && at - first > 1))
            return false;
        tokens[count++] = (uint32_t)(negative ? 0 - value : value);
        if (text[at] != ',') {
            at = skip_space(text, at, end);
            if (at == end)
                break;
            if (text[at] != ',')
                return false;
        }
        at = skip_space(text, at + 1, end);
        if (at == end)
            return false;
    }
    array->count = count;
    return true;
}
