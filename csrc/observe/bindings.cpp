// SPDX-License-Identifier: Apache-2.0

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "observe/event_ring.h"

namespace py = pybind11;

namespace zerosharder {
namespace {

EventKind kind_from(const std::string& name) {
  for (const EventKind kind : {EventKind::kRead, EventKind::kWrite, EventKind::kStep}) {
    if (name == event_name(kind)) return kind;
  }
  throw py::value_error("no such kind of event: " + name);
}

// A bounded number of events in one call: producers that never stop must not keep the reader for ever.
py::list drain(EventRing& ring) {
  py::list events;
  Event event;
  for (std::size_t left = ring.capacity(); left > 0 && ring.pop(event); --left) {
    events.append(py::make_tuple(event_name(event.kind), event.unit, event.nbytes, event.begin_ns, event.end_ns,
                                 event.thread));
  }
  return events;
}

}  // namespace

void bind_observe(py::module_& m) {
  py::class_<EventRing, std::shared_ptr<EventRing>>(
      m, "EventRing", "A bounded ring of events that native threads add to without a lock.")
      .def(py::init([](std::size_t capacity) {
             constexpr std::size_t kMost = std::size_t{1} << 24;
             if (capacity < 1 || capacity > kMost) throw py::value_error("capacity must be from 1 to 2**24");
             return std::make_shared<EventRing>(capacity);
           }),
           py::arg("capacity") = 16384)
      .def(
          "push",
          [](EventRing& ring, const std::string& kind, std::int64_t unit, std::uint64_t nbytes,
             std::int64_t begin_ns, std::int64_t end_ns) {
            return ring.push({kind_from(kind), thread_id(), unit, nbytes, begin_ns, end_ns});
          },
          py::arg("kind"), py::arg("unit"), py::arg("nbytes"), py::arg("begin_ns"), py::arg("end_ns"),
          "Add an event of this thread; False, and counted, if the ring is full.")
      .def("drain", &drain,
           "Take the events out, oldest first: (kind, unit, nbytes, begin_ns, end_ns, thread) of the clock of "
           "time.perf_counter_ns.")
      .def_property_readonly("capacity", &EventRing::capacity, "Events it can hold.")
      .def_property_readonly("dropped", &EventRing::dropped, "Events lost because it was full, ever.");
}

}  // namespace zerosharder
