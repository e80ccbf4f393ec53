/* What else is asked of the index, and what it is saved as. */
#include "object.h"
#include "snapshot.h"

static PyObject *core_holder_blocks(PyObject *object, PyObject *argument)
{
    Core *self = (Core *)object;
    uint32_t holder, slot;
    if (!small(argument, "holder", INT32_MAX, &holder))
        return NULL;
    uint64_t blocks[TIERS] = {0, 0, 0};
    PyThreadState *state = begin(self, false, false);
    if (holder_find(&self->index, holder, &slot))
        memcpy(blocks, self->index.holders[slot].blocks, sizeof blocks);
    end(self, state);
    return Py_BuildValue("(KKK)", (unsigned long long)blocks[NPU], (unsigned long long)blocks[CPU],
                         (unsigned long long)blocks[DISK]);
}

static PyObject *core_waiting_blocks(PyObject *object, PyObject *argument)
{
    Core *self = (Core *)object;
    uint32_t holder, slot;
    if (!small(argument, "holder", INT32_MAX, &holder))
        return NULL;
    PyThreadState *state = begin(self, false, false);
    uint64_t waiting = holder_find(&self->index, holder, &slot) ? self->index.holders[slot].waiting_blocks : 0;
    end(self, state);
    return PyLong_FromUnsignedLongLong(waiting);
}

/* stats() -> blocks, memberships, names, waiting, bytes, evicted, unknown_names, unknown_removals, renamed, forgotten */
static PyObject *core_stats(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Core *self = (Core *)object;
    PyThreadState *state = begin(self, false, false);
    const Index *index = &self->index;
    unsigned long long values[] = {index->held, index->memberships, index->name_count, index->room.blocks,
                                   index->memory.bytes, index->counters.evicted, index->counters.unknown_names,
                                   index->counters.unknown_removals, index->counters.renamed, index->forgotten};
    end(self, state);
    return Py_BuildValue("(KKKKKKKKKK)", values[0], values[1], values[2], values[3], values[4], values[5], values[6],
                         values[7], values[8], values[9]);
}

static PyObject *core_audit(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Core *self = (Core *)object;
    Violations violations = {0};
    PyThreadState *state = begin(self, false, true);
    audit(&self->index, &violations);
    end(self, state);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < violations.count; i++) {
        PyObject *text = PyUnicode_FromString(violations.texts[i]);
        if (!text || PyList_Append(list, text) < 0)
            Py_CLEAR(list);
        Py_XDECREF(text);
    }
    return list;
}

static PyObject *core_snapshot(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    Core *self = (Core *)object;
    Bytes bytes = {0};
    PyThreadState *state = begin(self, false, true);
    snapshot(&self->index, &bytes);
    end(self, state);
    PyObject *result = PyBytes_FromStringAndSize((char *)bytes.data, (Py_ssize_t)bytes.length);
    free(bytes.data);
    return result;
}

static PyObject *core_restore(PyObject *object, PyObject *argument)
{
    Core *self = (Core *)object;
    Py_buffer buffer;
    if (PyObject_GetBuffer(argument, &buffer, PyBUF_SIMPLE) < 0)
        return NULL;
    uint64_t *copy;
    const uint8_t *data = (const uint8_t *)aligned(&buffer, &copy);
    PyThreadState *state = begin(self, true, true);
    const char *wrong = restore(&self->index, data, (size_t)buffer.len);
    end(self, state);
    free(copy);
    PyBuffer_Release(&buffer);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef size_methods[] = {
    {"holder_blocks", core_holder_blocks, METH_O, "holder_blocks(holder)"},
    {"waiting_blocks", core_waiting_blocks, METH_O, "waiting_blocks(holder)"},
    {"stats", core_stats, METH_NOARGS, "stats()"},
    {"audit", core_audit, METH_NOARGS, "audit()"},
    {"snapshot", core_snapshot, METH_NOARGS, "snapshot()"},
    {"restore", core_restore, METH_O, "restore(snapshot)"},
    {NULL, NULL, 0, NULL},
};
