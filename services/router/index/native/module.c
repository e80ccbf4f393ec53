/* services.router.index.native._core: the types. */
#include "object.h"

PyTypeObject *candidates_type;

enum { MOST_METHODS = 32 };
static PyMethodDef core_methods[MOST_METHODS];

static void collect_methods(void)
{
    PyMethodDef *const lists[] = {change_methods, query_methods, size_methods};
    int count = 0;
    for (int i = 0; i < 3; i++)
        for (PyMethodDef *method = lists[i]; method->ml_name && count < MOST_METHODS - 1; method++)
            core_methods[count++] = *method;
}

static PyType_Slot core_slots[] = {
    {Py_tp_new, core_new}, {Py_tp_dealloc, core_free}, {Py_tp_methods, core_methods}, {0, NULL}};
static PyType_Spec core_spec = {
    "services.router.index.native._core.Core", sizeof(Core), 0, Py_TPFLAGS_DEFAULT, core_slots};

static PyType_Slot candidates_slots[] = {{Py_tp_dealloc, candidates_free}, {0, NULL}};
static PyType_Spec candidates_spec = {"services.router.index.native._core.Candidates", sizeof(CandidatesObject), 0,
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, candidates_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "The compiled prefix index.", -1, NULL, NULL, NULL,
                                    NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    collect_methods();
    PyObject *made = PyModule_Create(&module);
    PyObject *core = made ? PyType_FromSpec(&core_spec) : NULL;
    candidates_type = core ? (PyTypeObject *)PyType_FromSpec(&candidates_spec) : NULL;
    if (!candidates_type || PyModule_AddObjectRef(made, "Core", core) < 0)
        Py_CLEAR(made);
    Py_XDECREF(core);
    return made;
}
