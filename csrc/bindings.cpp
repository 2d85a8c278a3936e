// SPDX-License-Identifier: Apache-2.0
//
// The Python face of csrc/. No torch headers here: pointers and sizes only, so that one build serves every torch.

#include "optim/bindings.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "memory/buffer.h"

namespace py = pybind11;

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

std::unique_ptr<zerosharder::Buffer> make_buffer(const py::int_& nbytes, bool huge, bool populate) {
  int overflow = 0;
  const long long wanted = PyLong_AsLongLongAndOverflow(nbytes.ptr(), &overflow);
  if (wanted == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (overflow < 0 || (overflow == 0 && wanted <= 0)) {
    throw py::value_error("nbytes must be at least 1, got " + std::string(py::str(nbytes)));
  }
  if (overflow > 0) {
    throw std::system_error(ENOMEM, std::generic_category(), "mmap of " + std::string(py::str(nbytes)) + " bytes");
  }
  py::gil_scoped_release released;  // a first touch of many GiB takes seconds
  return std::make_unique<zerosharder::Buffer>(static_cast<std::size_t>(wanted),
                                               zerosharder::Buffer::Options{huge, populate});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native parts of zerosharder.";
  m.attr("HUGE_PAGE") = zerosharder::kHugePage;
  m.attr("PAGE") = zerosharder::page_size();

  py::register_local_exception_translator(translate_system_error);

  py::class_<zerosharder::Buffer>(
      m, "Buffer", py::buffer_protocol(),
      "Zeroed host memory that starts on a 2 MiB boundary; a writable buffer of bytes.")
      .def(py::init(&make_buffer), py::arg("nbytes"), py::kw_only(), py::arg("huge") = false,
           py::arg("populate") = false)
      .def_buffer([](zerosharder::Buffer& self) {
        return py::buffer_info(static_cast<std::uint8_t*>(self.data()), static_cast<py::ssize_t>(self.nbytes()));
      })
      .def("__len__", &zerosharder::Buffer::nbytes)
      .def_property_readonly("nbytes", &zerosharder::Buffer::nbytes, "Bytes asked for.")
      .def_property_readonly("address", &zerosharder::Buffer::address, "Address of the first byte.")
      .def_property_readonly("huge", &zerosharder::Buffer::huge,
                             "Whether the kernel accepted the huge-page advice.")
      .def("release_pages", &zerosharder::Buffer::release_pages, py::call_guard<py::gil_scoped_release>(),
           "Give the pages back to the kernel; the content is zeros afterwards.");

  zerosharder::bind_optim(m);
}
