/* The index as a Python object: its locks, and the arguments of its methods.
 *
 * Arguments are checked here, the index behind it takes them as they are. Readers run beside each other, a writer runs
 * alone (one lock per index). Whoever works for longer lets go of the GIL; nobody waits for the lock while holding the
 * GIL, and nobody takes the GIL while holding the lock.
 */
#ifndef KVROUTE_OBJECT_H
#define KVROUTE_OBJECT_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "match.h"

enum { SHORT_WORK = 128, SCRATCHES = 4 };

typedef struct {
    PyObject_HEAD
    Index index;
    pthread_rwlock_t lock;
    pthread_mutex_t scratch_lock;
    Scratch scratches[SCRATCHES];
    int scratch_count;
} Core;

/* owner: the index whose slots they know. */
typedef struct {
    PyObject_HEAD
    PyObject *owner;
    Candidates candidates;
} CandidatesObject;

extern PyTypeObject *candidates_type;

static inline bool expect(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments expected, got %zd", wanted, given);
    return given == wanted;
}

static inline bool number(PyObject *object, const char *name, uint64_t most, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be an integer from 0 to %llu", name, (unsigned long long)most);
        return false;
    }
    if (*value > most) {
        PyErr_Format(PyExc_ValueError, "%s must be at most %llu", name, (unsigned long long)most);
        return false;
    }
    return true;
}

static inline bool small(PyObject *object, const char *name, uint32_t most, uint32_t *value)
{
    uint64_t wide;
    bool fine = number(object, name, most, &wide);
    *value = (uint32_t)wide;
    return fine;
}

/* A buffer of whole items; to be released if true is returned. */
static inline bool items(PyObject *object, const char *name, size_t size, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) < 0)
        return false;
    if ((size_t)buffer->len % size == 0)
        return true;
    PyErr_Format(PyExc_ValueError, "%s must be a multiple of %zu bytes long, got %zd", name, size, buffer->len);
    PyBuffer_Release(buffer);
    return false;
}

/* The same as aligned numbers: the buffer's own where it is aligned, else a copy, to be freed. */
static inline const uint64_t *aligned(const Py_buffer *buffer, uint64_t **copy)
{
    *copy = NULL;
    if ((uintptr_t)buffer->buf % 8 == 0)
        return buffer->buf;
    *copy = malloc((size_t)buffer->len + 1);
    if (*copy)
        memcpy(*copy, buffer->buf, (size_t)buffer->len);
    return *copy;
}

static inline bool tiers_of(PyObject *object, bool *tiers)
{
    Py_ssize_t count = PySequence_Size(object);
    if (count < 0)
        return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        uint32_t tier;
        bool fine = item && small(item, "tier", TIERS - 1, &tier);
        Py_XDECREF(item);
        if (!fine)
            return false;
        tiers[tier] = true;
    }
    return true;
}

static inline PyThreadState *begin(Core *self, bool write, bool lengthy)
{
    PyThreadState *state = NULL;
    if (!lengthy && !(write ? pthread_rwlock_trywrlock(&self->lock) : pthread_rwlock_tryrdlock(&self->lock)))
        return state;
    state = PyEval_SaveThread();
    if (write)
        pthread_rwlock_wrlock(&self->lock);
    else
        pthread_rwlock_rdlock(&self->lock);
    return state;
}

static inline void end(Core *self, PyThreadState *state)
{
    pthread_rwlock_unlock(&self->lock);
    if (state)
        PyEval_RestoreThread(state);
}

PyObject *core_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords);
void core_free(PyObject *object);
void candidates_free(PyObject *object);

/* Arrays of methods, each ended by an empty one. */
extern PyMethodDef change_methods[], query_methods[], size_methods[];
#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))core_##name, METH_FASTCALL, text}

#endif
