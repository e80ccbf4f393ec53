#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t counted(size_t size) { return size ? ((size + 8 + 15) & ~(size_t)15) : 0; }

static void *or_end(void *at)
{
    if (at == NULL) {
        fputs("kvroute index: out of memory\n", stderr);
        abort();
    }
    return at;
}

void *memory_take(Memory *memory, size_t size)
{
    if (!size)
        return NULL;
    memory->bytes += counted(size);
    return or_end(calloc(1, size));
}

void memory_give(Memory *memory, void *at, size_t size)
{
    if (!at)
        return;
    memory->bytes -= counted(size);
    free(at);
}

void *memory_resize(Memory *memory, void *at, size_t size, size_t new_size)
{
    memory->bytes += counted(new_size) - counted(size);
    char *moved = or_end(realloc(at, new_size));
    if (new_size > size)
        memset(moved + size, 0, new_size - size);
    return moved;
}
