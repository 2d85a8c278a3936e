// SPDX-License-Identifier: Apache-2.0
//
// What the bindings of several parts need.

#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <string>

namespace zerosharder {

// Seconds from now as a point in time; None and infinity mean never. ValueError for NaN and negative numbers.
inline std::chrono::steady_clock::time_point deadline_after(std::optional<double> seconds) {
  using Clock = std::chrono::steady_clock;
  if (!seconds) return Clock::time_point::max();
  if (!(*seconds >= 0))
    throw pybind11::value_error("timeout must not be negative, got " + std::to_string(*seconds));
  constexpr double kNever = 1e9;  // more would overflow nanoseconds
  if (*seconds > kNever) return Clock::time_point::max();
  return Clock::now() + std::chrono::nanoseconds(static_cast<long long>(*seconds * 1e9));
}

// Raises what a signal handler of Python raised (Ctrl-C). Called without the GIL by those who wait.
inline void check_signals() {
  const pybind11::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// A view of the bytes of a Python object. Move-only; must be destroyed with the GIL held.
class View {
 public:
  View() = default;
  View(const pybind11::handle& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw pybind11::error_already_set();
    }
  }
  View(View&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  View& operator=(View&&) = delete;
  ~View() { release(); }

  void release() noexcept {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  unsigned char* data() const noexcept { return static_cast<unsigned char*>(view_.buf); }
  std::size_t nbytes() const noexcept { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

}  // namespace zerosharder
