/* The module horovodlike.torch._ops.native_calls passes tensors to the engine, and results back, in one call each.
 *
 * PyTorch's own C functions give a tensor's memory. The interpreter's lock is held from the reading of the address to
 * the copy, so no other thread enters a function that moves the memory; a thread that is inside such a function already
 * may still move it (docs/developers/design.md). The same checks in Python take some ten calls, longer than the
 * engine's part of a small operation. The engine is called with the lock held, too (docs/developers/threads.md).
 * native_calls.pyi documents the functions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "hvl.h"

/* DLPack's C exchange API, version 1, as far as it is used here. */
enum { DLPACK_MAJOR = 1, DLPACK_CPU = 1 };

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} dlpack_dtype;

typedef struct {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  dlpack_dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_exchange_api {
  uint32_t major;
  uint32_t minor;
  const struct dlpack_exchange_api* previous;
  void (*unused[3])(void);
  int (*describe)(void* tensor, dlpack_tensor* described);
  void (*unused_stream)(void);
} dlpack_exchange_api;

/* PyTorch's types and functions, set by use_torch(); `describe` is null before that. */
static struct {
  int (*describe)(void*, dlpack_tensor*);
  PyTypeObject *tensor, *parameter;
  PyCFunction is_neg, untyped_storage, nbytes, data_ptr, is_mode_enabled;
} torch;

/* Returns the C function of a built-in function without arguments; null with an error set for any other object. */
static PyCFunction without_arguments(PyObject* function) {
  if (!PyObject_TypeCheck(function, &PyCFunction_Type) || PyCFunction_GetFlags(function) != METH_NOARGS) {
    PyErr_SetString(PyExc_TypeError, "not a built-in function without arguments");
    return NULL;
  }
  return PyCFunction_GetFunction(function);
}

static PyObject* use_torch(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *tensor, *parameter, *capsule, *functions[5];
  if (!PyArg_ParseTuple(arguments, "OOOOOOOO", &tensor, &parameter, &capsule, &functions[0], &functions[1],
                        &functions[2], &functions[3], &functions[4])) {
    return NULL;
  }
  const dlpack_exchange_api* api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL) return NULL;
  while (api != NULL && api->major > DLPACK_MAJOR) api = api->previous;
  if (api == NULL || api->major != DLPACK_MAJOR || api->describe == NULL) {
    PyErr_SetString(PyExc_TypeError, "DLPack's exchange API has no version 1");
    return NULL;
  }
  PyCFunction* const found[] = {&torch.is_neg, &torch.untyped_storage, &torch.nbytes, &torch.data_ptr,
                                &torch.is_mode_enabled};
  for (int index = 0; index < 5; ++index) {
    if ((*found[index] = without_arguments(functions[index])) == NULL) return NULL;
  }
  Py_INCREF(tensor);
  Py_INCREF(parameter);
  torch.tensor = (PyTypeObject*)tensor;
  torch.parameter = (PyTypeObject*)parameter;
  torch.describe = api->describe;
  Py_RETURN_NONE;
}

/* The limit of one wait. After it Python can run its signal handlers. */
static const double WAIT_SECONDS = 1.0;

/* A description of the tensors on the CPU that fit a request. */
typedef struct {
  hvl_prepared* prepared;
  PyObject* request; /* keeps `prepared` alive */
  dlpack_dtype dtype;
  int64_t num_bytes;
  int32_t ndim;
  int64_t layout[]; /* `ndim` extents, and as many strides */
} context;

static const char CONTEXT[] = "horovodlike.torch._ops.native_calls";

static context* context_of(PyObject* capsule) { return PyCapsule_GetPointer(capsule, CONTEXT); }

static void release(PyObject* capsule) {
  context* self = context_of(capsule);
  Py_DECREF(self->request);
  free(self);
}

/* Converts an integer and drops its reference. Returns -1 with an error set if the object is no integer, or null. */
static int64_t number(PyObject* object) {
  const int64_t value = object != NULL ? PyLong_AsLongLong(object) : -1;
  Py_XDECREF(object);
  return value;
}

/* Returns 0 for False and 1 for all else, an error (null) included. Drops the reference. */
static int is_true(PyObject* object) {
  const int is = object != Py_False;
  Py_XDECREF(object);
  return is;
}

/* Returns 1 if PyTorch's functions run no Python code for this tensor, as they may for a subclass or in a mode. */
static int is_plain(PyObject* tensor) {
  const PyTypeObject* type = Py_TYPE(tensor);
  return torch.describe != NULL && (type == torch.tensor || type == torch.parameter) &&
         !is_true(torch.is_mode_enabled(NULL, NULL));
}

/* Returns 1 if a tensor is on the CPU and has the dtype, shape and strides of the context. */
static int fits(const context* self, const dlpack_tensor* tensor) {
  if (tensor->device_type != DLPACK_CPU || tensor->ndim != self->ndim ||
      memcmp(&tensor->dtype, &self->dtype, sizeof tensor->dtype) != 0) {
    return 0;
  }
  const int64_t *shape = self->layout, *strides = shape + self->ndim;
  for (int32_t d = 0; d < self->ndim; ++d) {
    if (tensor->shape[d] != shape[d] || (shape[d] != 1 && tensor->strides[d] != strides[d])) return 0;
  }
  return 1;
}

/* Returns the memory of a tensor; null if the tensor does not fit the context, or reaches beyond its storage, which
 * PyTorch allows to be smaller than its tensors. data_ptr() moves a storage that shares memory with a lazy clone to
 * memory of its own. `*storage` becomes a new reference, or null. It keeps the memory if another thread, in a function
 * of PyTorch that has released the interpreter's lock, gives the tensor another storage. */
static char* memory_of(const context* self, PyObject* tensor, PyObject** storage) {
  *storage = NULL;
  /* is_neg() releases the interpreter's lock, so it comes before the address is read. No later call releases it. */
  if (!is_plain(tensor) || is_true(torch.is_neg(tensor, NULL))) return NULL;
  *storage = torch.untyped_storage(tensor, NULL);
  if (*storage == NULL) return NULL;
  const int64_t begin = number(torch.data_ptr(*storage, NULL));
  const int64_t num_bytes = begin > 0 ? number(torch.nbytes(*storage, NULL)) : -1;
  dlpack_tensor described;
  if (num_bytes <= 0 || torch.describe(tensor, &described) != 0 || !fits(self, &described)) {
    return NULL;
  }
  const int64_t address = (int64_t)((uintptr_t)described.data + described.byte_offset);
  const int is_within = address >= begin && address - begin + self->num_bytes <= num_bytes;
  return is_within ? (char*)(uintptr_t)address : NULL;
}

/* Returns the second argument of an enqueue function, the list for handle and storage; null with an error set. */
static PyObject* list_of(PyObject* const* arguments, Py_ssize_t count) {
  if (count == 2 && PyList_Check(arguments[1]) && PyList_Size(arguments[1]) == 2) return arguments[1];
  PyErr_SetString(PyExc_TypeError, "expected a tensor and a list of two");
  return NULL;
}

/* Writes a handle to the list, and returns it. A refused enqueue has no effect, and its handle is 0: the caller then
 * takes the slow path, which raises the error. Leaks the storage if the handle is lost for lack of memory. */
static PyObject* note(PyObject* list, int64_t handle) {
  PyErr_Clear();
  PyObject* number = PyLong_FromLongLong(handle > 0 ? handle : 0);
  if (number == NULL || PyList_SetItem(list, 0, Py_NewRef(number)) != 0) Py_INCREF(PyList_GetItem(list, 1));
  return number;
}

static PyObject* enqueue_copied(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  const context* self = context_of(capsule);
  PyObject *storage, *list = list_of(arguments, count);
  if (list == NULL) return NULL;
  const char* memory = memory_of(self, arguments[0], &storage);
  const int64_t handle = memory != NULL ? hvl_enqueue_copied(self->prepared, (uintptr_t)memory) : 0;
  Py_XDECREF(storage);
  return note(list, handle);
}

static PyObject* enqueue_and_wait(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  const context* self = context_of(capsule);
  PyObject *storage, *list = list_of(arguments, count);
  if (list == NULL) return NULL;
  const char* memory = memory_of(self, arguments[0], &storage);
  if (storage != NULL) PyList_SetItem(list, 1, storage);
  const int64_t handle = memory != NULL ? hvl_enqueue_inplace(self->prepared, (uintptr_t)memory) : 0;
  PyObject* number = note(list, handle);
  if (handle > 0 && number != NULL) {
    Py_BEGIN_ALLOW_THREADS;
    hvl_wait_until_complete(handle, WAIT_SECONDS);
    Py_END_ALLOW_THREADS;
  }
  return number;
}

/* Reads the handle from the arguments of a take function. Returns 0, or -1 with an error set. */
static int parse(PyObject* const* arguments, Py_ssize_t count, int64_t* handle) {
  *handle = count == 2 ? PyLong_AsLongLong(arguments[0]) : 0;
  if (count != 2) PyErr_SetString(PyExc_TypeError, "expected a handle and a tensor");
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject* take_copied(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  int64_t handle;
  if (parse(arguments, count, &handle) != 0) return NULL;
  PyObject* storage;
  char* memory = memory_of(context_of(capsule), arguments[1], &storage);
  const int32_t status = memory != NULL ? hvl_take_copy(handle, (uintptr_t)memory) : -1;
  PyErr_Clear();
  Py_XDECREF(storage);
  return PyLong_FromLong(status);
}

static PyObject* take(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  (void)capsule;
  int64_t handle;
  if (parse(arguments, count, &handle) != 0) return NULL;
  return PyLong_FromLong(hvl_try_wait(handle));
}

#define WITH_TWO_ARGUMENTS(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL
static PyMethodDef CALLS[] = {
    {"enqueue_copied", WITH_TWO_ARGUMENTS(enqueue_copied), NULL},
    {"take_copied", WITH_TWO_ARGUMENTS(take_copied), NULL},
    {"enqueue_and_wait", WITH_TWO_ARGUMENTS(enqueue_and_wait), NULL},
    {"take", WITH_TWO_ARGUMENTS(take), NULL},
};

static PyObject* make_context(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *request, *of_dtype, *shape, *strides;
  unsigned long long prepared;
  dlpack_tensor described;
  if (!PyArg_ParseTuple(arguments, "OKOO!O!", &request, &prepared, &of_dtype, &PyTuple_Type, &shape, &PyTuple_Type,
                        &strides)) {
    return NULL;
  }
  if (torch.describe == NULL || !PyObject_TypeCheck(of_dtype, torch.tensor) ||
      torch.describe(of_dtype, &described) != 0) {
    return PyErr_Format(PyExc_TypeError, "not a tensor that PyTorch can describe");
  }
  const Py_ssize_t ndim = PyTuple_Size(shape);
  context* self = calloc(1, sizeof *self + 2 * (size_t)ndim * sizeof self->layout[0]);
  if (self == NULL) return PyErr_NoMemory();
  self->prepared = (hvl_prepared*)(uintptr_t)prepared;
  self->dtype = described.dtype;
  self->num_bytes = described.dtype.bits / 8;
  self->ndim = (int32_t)ndim;
  for (Py_ssize_t d = 0; d < ndim; ++d) {
    self->layout[d] = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
    self->layout[ndim + d] = PyLong_AsLongLong(PyTuple_GetItem(strides, d)); /* sets an error if there are fewer */
    self->num_bytes *= self->layout[d];
  }
  PyObject* capsule = PyErr_Occurred() ? NULL : PyCapsule_New(self, CONTEXT, release);
  if (capsule == NULL) {
    free(self);
    return NULL;
  }
  Py_INCREF(request);
  self->request = request;
  return capsule;
}

static PyObject* make_calls(PyObject* module, PyObject* capsule) {
  (void)module;
  if (context_of(capsule) == NULL) return NULL;
  return Py_BuildValue("(NNNN)", PyCFunction_New(&CALLS[0], capsule), PyCFunction_New(&CALLS[1], capsule),
                       PyCFunction_New(&CALLS[2], capsule), PyCFunction_New(&CALLS[3], capsule));
}

static PyObject* memory(PyObject* module, PyObject* arguments) {
  (void)module;
  PyObject *contexts, *tensors;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &contexts, &PyList_Type, &tensors)) return NULL;
  const Py_ssize_t count = PyList_Size(contexts);
  if (PyList_Size(tensors) != count) Py_RETURN_NONE;
  PyObject *addresses = PyList_New(count), *storages = PyList_New(count);
  int fit = addresses != NULL && storages != NULL;
  for (Py_ssize_t index = 0; fit && index < count; ++index) {
    const context* self = context_of(PyList_GetItem(contexts, index));
    PyObject* storage = NULL;
    const char* begin = self != NULL ? memory_of(self, PyList_GetItem(tensors, index), &storage) : NULL;
    PyObject* address = begin != NULL ? PyLong_FromUnsignedLongLong((uintptr_t)begin) : NULL;
    fit = address != NULL;
    if (storage != NULL) PyList_SetItem(storages, index, storage);
    if (address != NULL) PyList_SetItem(addresses, index, address);
  }
  PyErr_Clear(); /* the caller then takes the slow path, which raises the error */
  PyObject* both = fit ? PyTuple_Pack(2, addresses, storages) : Py_NewRef(Py_None);
  Py_XDECREF(addresses);
  Py_XDECREF(storages);
  return both;
}

static PyMethodDef FUNCTIONS[] = {
    {"use_torch", use_torch, METH_VARARGS, NULL},
    {"context", make_context, METH_VARARGS, NULL},
    {"calls", make_calls, METH_O, NULL},
    {"memory", memory, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "native_calls", NULL, -1, FUNCTIONS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_calls(void) { return PyModule_Create(&MODULE); }
