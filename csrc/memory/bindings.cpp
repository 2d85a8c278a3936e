// SPDX-License-Identifier: Apache-2.0

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "memory/buffer.h"
#include "memory/slot_pool.h"
#include "python.h"

namespace py = pybind11;

namespace zerosharder {
namespace {

// A positive size from any Python int: ValueError below 1, OSError (ENOMEM) beyond what 64 bits hold.
std::size_t size_from(const py::int_& value, const char* name) {
  int overflow = 0;
  const long long wanted = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (wanted == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (overflow < 0 || (overflow == 0 && wanted <= 0)) {
    throw py::value_error(std::string(name) + " must be at least 1, got " + std::string(py::str(value)));
  }
  if (overflow > 0) {
    throw std::system_error(ENOMEM, std::generic_category(), "mmap of " + std::string(py::str(value)) + " bytes");
  }
  return static_cast<std::size_t>(wanted);
}

std::unique_ptr<Buffer> make_buffer(const py::int_& nbytes, bool huge, bool populate, bool lock,
                                    unsigned threads) {
  const std::size_t wanted = size_from(nbytes, "nbytes");
  py::gil_scoped_release released;  // a first touch of many GiB takes seconds
  return std::make_unique<Buffer>(wanted, Buffer::Options{huge, populate, lock, threads});
}

std::shared_ptr<SlotPool> make_pool(const py::int_& slot_bytes, const py::int_& count, bool huge, bool lock) {
  const std::size_t wanted = size_from(slot_bytes, "slot_bytes");
  const std::size_t slots = size_from(count, "count");
  py::gil_scoped_release released;
  return SlotPool::make(wanted, slots, Buffer::Options{huge, true, lock, 0});
}

SlotPool::Slot acquire(SlotPool& pool, std::optional<double> timeout) {
  const auto deadline = deadline_after(timeout);
  py::gil_scoped_release released;
  SlotPool::Slot slot = pool.acquire_until(deadline, check_signals);
  if (!slot) {
    throw std::system_error(ETIMEDOUT, std::generic_category(),
                            "all " + std::to_string(pool.count()) + " slots of " +
                                std::to_string(pool.slot_bytes()) + " bytes stayed in use for " +
                                std::to_string(*timeout) + " s");
  }
  return slot;
}

const SlotPool::Slot& held(const SlotPool::Slot& slot) {
  if (!slot) throw py::value_error("the slot was given back");
  return slot;
}

py::buffer_info bytes_of(void* data, std::size_t nbytes) {
  return {static_cast<std::uint8_t*>(data), static_cast<py::ssize_t>(nbytes)};
}

}  // namespace

void bind_memory(py::module_& m) {
  m.attr("HUGE_PAGE") = kHugePage;
  m.attr("PAGE") = page_size();

  py::class_<Buffer>(m, "Buffer", py::buffer_protocol(),
                     "Zeroed host memory that starts on a 2 MiB boundary; a writable buffer of bytes.")
      .def(py::init(&make_buffer), py::arg("nbytes"), py::kw_only(), py::arg("huge") = false,
           py::arg("populate") = false, py::arg("lock") = false, py::arg("threads") = 0)
      .def_buffer([](Buffer& self) { return bytes_of(self.data(), self.nbytes()); })
      .def("__len__", &Buffer::nbytes)
      .def_property_readonly("nbytes", &Buffer::nbytes, "Bytes asked for.")
      .def_property_readonly("address", &Buffer::address, "Address of the first byte.")
      .def_property_readonly("huge", &Buffer::huge, "Whether the kernel accepted the huge-page advice.")
      .def_property_readonly("locked", &Buffer::locked, "Whether all of it is locked into RAM.")
      .def_property_readonly("lock_error", &Buffer::lock_error,
                             "The errno of a refusal to lock; 0 if it is locked or was not to be.")
      .def("release_pages", &Buffer::release_pages, py::call_guard<py::gil_scoped_release>(),
           "Give the pages back to the kernel; the content is zeros afterwards.");

  py::class_<SlotPool, std::shared_ptr<SlotPool>>(
      m, "SlotPool", "Equal staging slots in one buffer; who finds it empty waits in line.")
      .def(py::init(&make_pool), py::arg("slot_bytes"), py::arg("count"), py::kw_only(), py::arg("huge") = true,
           py::arg("lock") = false)
      .def("acquire", &acquire, py::arg("timeout") = py::none(),
           "A free slot, first come first served. TimeoutError after `timeout` seconds.")
      .def_property_readonly("slot_bytes", &SlotPool::slot_bytes, "Bytes of one slot.")
      .def_property_readonly("count", &SlotPool::count, "Slots, free or not.")
      .def_property_readonly("free", &SlotPool::free_count, "Slots nobody holds.")
      .def_property_readonly("waiting", &SlotPool::waiting_count, "Threads in line.")
      .def_property_readonly(
          "nbytes", [](const SlotPool& self) { return self.buffer().nbytes(); },
          "Bytes of all slots and the padding between them.")
      .def_property_readonly(
          "address", [](const SlotPool& self) { return self.buffer().address(); }, "Address of the first slot.")
      .def_property_readonly(
          "locked", [](const SlotPool& self) { return self.buffer().locked(); },
          "Whether all of it is locked into RAM.")
      .def_property_readonly(
          "lock_error", [](const SlotPool& self) { return self.buffer().lock_error(); },
          "The errno of a refusal to lock; 0 if it is locked or was not to be.");

  py::class_<SlotPool::Slot>(
      m, "Slot", py::buffer_protocol(),
      "The right to use one slot, a writable buffer of bytes; given back when it is collected.")
      .def_buffer([](SlotPool::Slot& self) { return bytes_of(held(self).data(), self.nbytes()); })
      .def("__len__", &SlotPool::Slot::nbytes)
      .def_property_readonly(
          "index", [](const SlotPool::Slot& self) { return held(self).index(); }, "Which slot of the pool it is.")
      .def(
          "release", &SlotPool::Slot::release,
          "Give the slot back now. Views of its bytes must not be used any more: the next holder overwrites them.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](SlotPool::Slot& self, const py::args&) { self.release(); });

  m.def(
      "memory_counters",
      [] {
        const MemoryCounters now = memory_counters();
        py::dict result;
        result["held"] = now.held;
        result["locked"] = now.locked;
        result["peak"] = now.peak;
        return result;
      },
      "Bytes of all buffers of this process: mapped now, of these locked, and the most ever mapped.");
}

}  // namespace zerosharder
