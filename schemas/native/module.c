/* schemas.native._hashing: the hashes of schemas/blocks.py for Python. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "block_hashes.h"
#include "json_tokens.h"

enum { LENGTHY = 1 << 16 };

static PyObject *hash_bytes(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer data;
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "y*K", &data, &seed))
        return NULL;
    Xxh3Seed seeded;
    xxh3_seed(&seeded, seed);
    uint64_t hash = xxh3_64(&seeded, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(hash);
}

/* Hashes of whole blocks into new bytes; prefix keys from `root` on where chained. */
static PyObject *hash_blocks(Py_buffer *tokens, Py_ssize_t block_size, bool chained, uint64_t root)
{
    if (block_size < 1 || block_size > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "block_size must be at least 1, got %zd", block_size);
        return NULL;
    }
    size_t blocks = (size_t)tokens->len / 4 / (size_t)block_size;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * blocks));
    if (!result)
        return NULL;
    KeySource source = {.count = blocks, .tokens = tokens->buf, .block_size = (size_t)block_size, .root = root,
                        .mask = UINT64_MAX};
    source.keys = (uint64_t *)(void *)PyBytes_AsString(result);
    xxh3_seed(&source.seed, HASH_SEED);
    PyThreadState *state = tokens->len > LENGTHY ? PyEval_SaveThread() : NULL;
    if (chained && blocks)
        keys_extend(&source, blocks - 1);
    else
        content_hashes(tokens->buf, blocks * (size_t)block_size, (size_t)block_size, &source.seed, source.keys);
    if (state)
        PyEval_RestoreThread(state);
    return result;
}

static PyObject *content_hashes_of(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer tokens;
    Py_ssize_t block_size;
    if (!PyArg_ParseTuple(arguments, "y*n", &tokens, &block_size))
        return NULL;
    PyObject *result = hash_blocks(&tokens, block_size, false, 0);
    PyBuffer_Release(&tokens);
    return result;
}

static PyObject *token_keys(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer tokens;
    Py_ssize_t block_size;
    unsigned long long root;
    if (!PyArg_ParseTuple(arguments, "y*nK", &tokens, &block_size, &root))
        return NULL;
    PyObject *result = hash_blocks(&tokens, block_size, true, root);
    PyBuffer_Release(&tokens);
    return result;
}

static PyObject *prefix_keys(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer contents;
    unsigned long long root;
    if (!PyArg_ParseTuple(arguments, "y*K", &contents, &root))
        return NULL;
    PyObject *result = NULL;
    if (contents.len % 8) {
        PyErr_Format(PyExc_ValueError, "packed hashes must be a multiple of 8 bytes long, got %zd", contents.len);
    } else if ((result = PyBytes_FromStringAndSize(NULL, contents.len))) {
        KeySource source = {.count = (size_t)contents.len / 8, .contents = contents.buf, .root = root,
                            .mask = UINT64_MAX, .seed = {.seed = HASH_SEED}};
        source.keys = (uint64_t *)(void *)PyBytes_AsString(result);
        if (source.count)
            keys_extend(&source, source.count - 1);
    }
    PyBuffer_Release(&contents);
    return result;
}

static PyObject *take_tokens(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer body;
    const char *name;
    Py_ssize_t name_length;
    if (!PyArg_ParseTuple(arguments, "y*y#", &body, &name, &name_length))
        return NULL;
    const char *text = body.buf;
    size_t length = (size_t)body.len;
    TokenArray array;
    PyObject *result = NULL, *rest = NULL, *tokens = NULL;
    if (json_find_array(text, length, name, (size_t)name_length, &array)) {
        uint32_t *read = malloc(((array.end - array.start) / 2 + 1) * sizeof(uint32_t));
        bool fine = read && json_read_tokens(text, &array, read);
        if (fine && (tokens = PyBytes_FromStringAndSize((char *)read, (Py_ssize_t)(array.count * sizeof(uint32_t))))
            && (rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(length - (array.end - array.start))))) {
            char *to = PyBytes_AsString(rest);
            memcpy(to, text, array.start);
            memcpy(to + array.start, text + array.end, length - array.end);
            result = PyTuple_Pack(2, rest, tokens);
        }
        free(read);
    }
    PyBuffer_Release(&body);
    Py_XDECREF(rest);
    Py_XDECREF(tokens);
    if (!result && !PyErr_Occurred())
        Py_RETURN_NONE;
    return result;
}

/* One msgpack unsigned integer of at most 32 bits; NULL where there is none. */
static const uint8_t *read_u32(const uint8_t *at, const uint8_t *end, uint32_t *value)
{
    if (at == end)
        return NULL;
    size_t width = *at < 0x80 ? 0 : *at == 0xCC ? 1 : *at == 0xCD ? 2 : *at == 0xCE ? 4 : 9;
    if (width > 4 || (size_t)(end - at - 1) < width)
        return NULL;
    *value = width ? 0 : *at;
    for (at++; width; width--)
        *value = *value << 8 | *at++;
    return at;
}

static PyObject *packed_u32(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer elements;
    if (!PyArg_ParseTuple(arguments, "y*", &elements))
        return NULL;
    const uint8_t *at = elements.buf, *end = at + elements.len;
    uint32_t *values = malloc((size_t)elements.len * sizeof(uint32_t) + 1);
    size_t count = 0;
    while (values && at && at < end)
        at = read_u32(at, end, values + count++);
    PyObject *result = values && (at || !elements.len)
                           ? PyBytes_FromStringAndSize((char *)values, (Py_ssize_t)(count * sizeof(uint32_t)))
                           : NULL;
    free(values);
    PyBuffer_Release(&elements);
    if (!result && !PyErr_Occurred())
        Py_RETURN_NONE;
    return result;
}

static PyMethodDef methods[] = {
    {"xxh3_64", hash_bytes, METH_VARARGS, "xxh3_64(data, seed) -> int"},
    {"content_hashes", content_hashes_of, METH_VARARGS, "content_hashes(tokens, block_size) -> packed u64"},
    {"token_keys", token_keys, METH_VARARGS, "token_keys(tokens, block_size, root) -> packed u64"},
    {"prefix_keys", prefix_keys, METH_VARARGS, "prefix_keys(content_hashes, root) -> packed u64"},
    {"take_tokens", take_tokens, METH_VARARGS,
     "take_tokens(body, name) -> (the JSON body with that array empty, its integers as packed u32), or None"},
    {"packed_u32", packed_u32, METH_VARARGS,
     "packed_u32(elements of a msgpack array) -> packed u32, or None where any is no integer of 32 bits"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hashing", "XXH3-64 of token blocks.", -1, methods, NULL,
                                    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__hashing(void) { return PyModule_Create(&module); }
