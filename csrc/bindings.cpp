// SPDX-License-Identifier: Apache-2.0
//
// The Python face of csrc/. No torch headers here: pointers and sizes only, so that one build serves every torch.
// Each part binds itself in a file of its own.

#include <pybind11/pybind11.h>

#include <system_error>

namespace py = pybind11;

namespace zerosharder {
void bind_memory(py::module_& m);
void bind_observe(py::module_& m);
void bind_io(py::module_& m);
void bind_optim(py::module_& m);
}  // namespace zerosharder

namespace {

// std::system_error -> OSError(errno, message), whose constructor picks the subclass that fits the errno.
void translate_system_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    PyObject* args = Py_BuildValue("(is)", error.code().value(), error.what());
    if (args == nullptr) return;  // a Python error is set already
    PyErr_SetObject(PyExc_OSError, args);
    Py_DECREF(args);
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native parts of zerosharder.";
  py::register_local_exception_translator(translate_system_error);
  zerosharder::bind_memory(m);
  zerosharder::bind_observe(m);
  zerosharder::bind_optim(m);
  zerosharder::bind_io(m);  // registers a translator for a class derived from the above: it has to come after it
}
