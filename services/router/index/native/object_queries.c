/* What is asked of the index on the way of a request. */
#include "object.h"

static uint32_t *words(PyObject *object, const char *name, uint32_t *count)
{
    Py_buffer buffer;
    if (!items(object, name, 4, &buffer))
        return NULL;
    uint32_t *copy = malloc((size_t)buffer.len + 4);
    if (copy) {
        memcpy(copy, buffer.buf, (size_t)buffer.len);
        *count = (uint32_t)(buffer.len / 4);
    } else {
        PyErr_NoMemory();
    }
    PyBuffer_Release(&buffer);
    return copy;
}

void candidates_free(PyObject *object)
{
    Candidates *candidates = &((CandidatesObject *)object)->candidates;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((CandidatesObject *)object)->owner);
    free(candidates->holders);
    free(candidates->locals);
    free(candidates->local_ends);
    free(candidates->pools);
    free(candidates->slots);
    free(candidates->local_slots);
    free(candidates->pool_slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* candidates(holders, locals, local_ends, pools), packed u32 each. */
static PyObject *core_candidates(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expect(count, 4))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(candidates_type, Py_tp_alloc);
    CandidatesObject *made = (CandidatesObject *)allocate(candidates_type, 0);
    if (!made)
        return NULL;
    made->owner = Py_NewRef(object);
    Candidates *candidates = &made->candidates;
    uint32_t ends = 0;
    if (!(candidates->holders = words(arguments[0], "holders", &candidates->count))
        || !(candidates->locals = words(arguments[1], "locals", &candidates->local_count))
        || !(candidates->local_ends = words(arguments[2], "local_ends", &ends))
        || !(candidates->pools = words(arguments[3], "pools", &candidates->pool_count))) {
        Py_DECREF(made);
        return NULL;
    }
    bool fine = ends == candidates->count;
    for (uint32_t i = 0, before = 0; fine && i < ends; before = candidates->local_ends[i++])
        fine = candidates->local_ends[i] >= before && candidates->local_ends[i] <= candidates->local_count;
    if (!fine) {
        PyErr_SetString(PyExc_ValueError, "local_ends must rise and have one entry per candidate");
        Py_DECREF(made);
        return NULL;
    }
    candidates->slots = malloc(candidates->count * sizeof(uint32_t) + 1);
    candidates->local_slots = malloc(candidates->local_count * sizeof(uint32_t) + 1);
    candidates->pool_slots = malloc(candidates->pool_count * sizeof(uint32_t) + 1);
    if (!candidates->slots || !candidates->local_slots || !candidates->pool_slots) {
        Py_DECREF(made);
        return PyErr_NoMemory();
    }
    return (PyObject *)made;
}

static Scratch take_scratch(Core *self)
{
    Scratch scratch = {0};
    pthread_mutex_lock(&self->scratch_lock);
    if (self->scratch_count)
        scratch = self->scratches[--self->scratch_count];
    pthread_mutex_unlock(&self->scratch_lock);
    return scratch;
}

static void give_scratch(Core *self, Scratch scratch)
{
    pthread_mutex_lock(&self->scratch_lock);
    bool kept = self->scratch_count < SCRATCHES;
    if (kept)
        self->scratches[self->scratch_count++] = scratch;
    pthread_mutex_unlock(&self->scratch_lock);
    if (!kept)
        scratch_free(&scratch);
}

/* Coverage of every candidate as packed u32: npu, cpu local, cpu remote, disk local, disk remote. */
static PyObject *answer(Core *self, KeySource *source, PyObject *candidates_object, bool owns_keys)
{
    if (!PyObject_TypeCheck(candidates_object, candidates_type)
        || ((CandidatesObject *)candidates_object)->owner != (PyObject *)self) {
        PyErr_SetString(PyExc_TypeError, "candidates must come from candidates() of the same index");
        return NULL;
    }
    Candidates *candidates = &((CandidatesObject *)candidates_object)->candidates;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(candidates->count * sizeof(Coverage)));
    if (!result)
        return NULL;
    if (owns_keys && !(source->keys = malloc(source->count * sizeof(uint64_t) + 1))) {
        Py_DECREF(result);
        return PyErr_NoMemory();
    }
    Coverage *coverages = (Coverage *)(void *)PyBytes_AsString(result);
    PyThreadState *state = begin(self, false, source->count > SHORT_WORK);
    source->mask = self->index.key_mask;
    if (!candidates_are_resolved(candidates, &self->index)) {
        pthread_mutex_lock(&self->scratch_lock);
        if (!candidates_are_resolved(candidates, &self->index))
            candidates_resolve(candidates, &self->index);
        pthread_mutex_unlock(&self->scratch_lock);
    }
    Scratch scratch = take_scratch(self);
    match(&self->index, source, candidates, coverages, &scratch);
    give_scratch(self, scratch);
    end(self, state);
    if (owns_keys)
        free(source->keys);
    return result;
}

static PyObject *core_match(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer keys;
    if (!expect(count, 2) || !items(arguments[0], "keys", 8, &keys))
        return NULL;
    uint64_t *copy;
    KeySource source = {.count = (size_t)keys.len / 8, .ready = (size_t)keys.len / 8};
    source.keys = (uint64_t *)(uintptr_t)aligned(&keys, &copy);
    PyObject *result = answer((Core *)object, &source, arguments[1], false);
    free(copy);
    PyBuffer_Release(&keys);
    return result;
}

/* match_tokens(tokens, block_size, root, candidates) */
static PyObject *core_match_tokens(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer tokens;
    KeySource source = {0};
    uint64_t block_size;
    if (!expect(count, 4) || !number(arguments[1], "block_size", INT32_MAX, &block_size)
        || !number(arguments[2], "root", UINT64_MAX, &source.root))
        return NULL;
    if (!block_size) {
        PyErr_SetString(PyExc_ValueError, "block_size must be at least 1");
        return NULL;
    }
    if (!items(arguments[0], "tokens", 4, &tokens))
        return NULL;
    source.tokens = tokens.buf;
    source.block_size = block_size;
    source.count = (size_t)tokens.len / 4 / block_size;
    xxh3_seed(&source.seed, HASH_SEED);
    PyObject *result = answer((Core *)object, &source, arguments[3], true);
    PyBuffer_Release(&tokens);
    return result;
}

/* match_contents(content_hashes, root, candidates) */
static PyObject *core_match_contents(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer contents;
    KeySource source = {0};
    if (!expect(count, 3) || !number(arguments[1], "root", UINT64_MAX, &source.root)
        || !items(arguments[0], "content_hashes", 8, &contents))
        return NULL;
    source.contents = contents.buf;
    source.count = (size_t)contents.len / 8;
    source.seed.seed = HASH_SEED;
    PyObject *result = answer((Core *)object, &source, arguments[2], true);
    PyBuffer_Release(&contents);
    return result;
}

PyMethodDef query_methods[] = {
    METHOD(candidates, "candidates(holders, locals, local_ends, pools)"),
    METHOD(match, "match(keys, candidates)"),
    METHOD(match_tokens, "match_tokens(tokens, block_size, root, candidates)"),
    METHOD(match_contents, "match_contents(content_hashes, root, candidates)"),
    {NULL, NULL, 0, NULL},
};
