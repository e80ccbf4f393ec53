/* What changes the index. */
#include "object.h"

PyObject *core_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"max_blocks", "max_waiting_blocks", "hash_bits", NULL};
    unsigned long long max_blocks, max_waiting_blocks;
    unsigned int hash_bits = 64;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KK|I", names, &max_blocks, &max_waiting_blocks, &hash_bits))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Core *self = (Core *)allocate(type, 0);
    if (!self)
        return NULL;
    index_init(&self->index, max_blocks, max_waiting_blocks, hash_bits);
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
#ifdef __GLIBC__
    /* Many readers must not keep the writer out. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&self->lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    pthread_mutex_init(&self->scratch_lock, NULL);
    return (PyObject *)self;
}

void core_free(PyObject *object)
{
    Core *self = (Core *)object;
    PyTypeObject *type = Py_TYPE(object);
    while (self->scratch_count)
        scratch_free(self->scratches + --self->scratch_count);
    index_free(&self->index);
    pthread_rwlock_destroy(&self->lock);
    pthread_mutex_destroy(&self->scratch_lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *core_stored(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Core *self = (Core *)object;
    Origin origin;
    uint64_t parent = 0, root;
    Py_buffer names, contents;
    if (!expect(count, 9) || !small(arguments[0], "holder", INT32_MAX, &origin.holder)
        || !small(arguments[1], "tier", TIERS - 1, &origin.tier)
        || !small(arguments[2], "domain", INT32_MAX, &origin.domain)
        || (arguments[4] != Py_None && !number(arguments[4], "parent", UINT64_MAX, &parent))
        || !number(arguments[6], "root", UINT64_MAX, &root)
        || !small(arguments[7], "parent_domain", INT32_MAX, &origin.parent_domain))
        return NULL;
    int counted = PyObject_IsTrue(arguments[8]);
    if (counted < 0 || !items(arguments[3], "engine_hashes", 8, &names))
        return NULL;
    origin.counted = counted;
    if (!items(arguments[5], "content_hashes", 8, &contents)) {
        PyBuffer_Release(&names);
        return NULL;
    }
    Stored stored = {0, 0, 0, 0, 0};
    bool fine = !contents.len || contents.len == names.len;
    if (fine) {
        uint64_t *names_copy, *contents_copy;
        const uint64_t *first = aligned(&names, &names_copy), *second = aligned(&contents, &contents_copy);
        bool chained = arguments[4] != Py_None;
        size_t blocks = (size_t)names.len / 8;
        PyThreadState *state = begin(self, true, blocks > SHORT_WORK);
        stored = index_stored(
            &self->index, &origin, first, contents.len ? second : NULL, blocks, chained ? &parent : NULL, root);
        end(self, state);
        free(names_copy);
        free(contents_copy);
    } else {
        PyErr_Format(
            PyExc_ValueError, "%zd engine hashes but %zd content hashes", names.len / 8, contents.len / 8);
    }
    PyBuffer_Release(&names);
    PyBuffer_Release(&contents);
    if (!fine)
        return NULL;
    return Py_BuildValue("(KKKKK)", (unsigned long long)stored.attached, (unsigned long long)stored.repeated,
                         (unsigned long long)stored.waiting, (unsigned long long)stored.unknown,
                         (unsigned long long)stored.refused);
}

static PyObject *core_removed(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Core *self = (Core *)object;
    uint32_t holder, tier, domain;
    Py_buffer names;
    if (!expect(count, 4) || !small(arguments[0], "holder", INT32_MAX, &holder)
        || !small(arguments[1], "tier", TIERS - 1, &tier) || !small(arguments[2], "domain", INT32_MAX, &domain)
        || !items(arguments[3], "engine_hashes", 8, &names))
        return NULL;
    uint64_t *copy;
    const uint64_t *first = aligned(&names, &copy);
    size_t blocks = (size_t)names.len / 8;
    PyThreadState *state = begin(self, true, blocks > SHORT_WORK);
    uint64_t left = index_removed(&self->index, holder, tier, first, blocks);
    end(self, state);
    free(copy);
    PyBuffer_Release(&names);
    return PyLong_FromUnsignedLongLong(left);
}

static PyObject *core_cleared(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Core *self = (Core *)object;
    uint32_t holder;
    bool tiers[TIERS] = {false, false, false};
    if (!expect(count, 2) || !small(arguments[0], "holder", INT32_MAX, &holder) || !tiers_of(arguments[1], tiers))
        return NULL;
    PyThreadState *state = begin(self, true, true);
    uint64_t left = index_cleared(&self->index, holder, tiers);
    end(self, state);
    return PyLong_FromUnsignedLongLong(left);
}

static PyObject *core_clear_some(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Core *self = (Core *)object;
    uint32_t holder;
    uint64_t limit;
    bool tiers[TIERS] = {false, false, false};
    if (!expect(count, 3) || !small(arguments[0], "holder", INT32_MAX, &holder) || !tiers_of(arguments[1], tiers)
        || !number(arguments[2], "limit", INT64_MAX / 16, &limit))
        return NULL;
    PyThreadState *state = begin(self, true, limit > SHORT_WORK);
    bool more = index_clear_some(&self->index, holder, tiers, limit);
    end(self, state);
    return PyBool_FromLong(more);
}

static PyObject *core_shrink(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Core *self = (Core *)object;
    uint64_t bytes, limit;
    if (!expect(count, 2) || !number(arguments[0], "bytes", UINT64_MAX, &bytes)
        || !number(arguments[1], "limit", INT64_MAX / 16, &limit))
        return NULL;
    PyThreadState *state = begin(self, true, true);
    bool more = index_shrink(&self->index, bytes, limit);
    end(self, state);
    return PyBool_FromLong(more);
}

PyMethodDef change_methods[] = {
    METHOD(stored, "stored(holder, tier, domain, engine_hashes, parent, content_hashes, root, parent_domain, counted)"),
    METHOD(removed, "removed(holder, tier, domain, engine_hashes)"),
    METHOD(cleared, "cleared(holder, tiers)"),
    METHOD(clear_some, "clear_some(holder, tiers, limit)"),
    METHOD(shrink, "shrink(bytes, limit)"),
    {NULL, NULL, 0, NULL},
};
