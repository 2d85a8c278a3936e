// SPDX-License-Identifier: Apache-2.0

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "io/engine.h"
#include "io/faults.h"
#include "io/file.h"
#include "io/transfer.h"
#include "python.h"

namespace py = pybind11;

namespace zerosharder::io {
namespace {

// IoError -> OSError(errno, text, path) with the numbers as attributes.
void translate_io_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    const int code = error.code().value();
    const std::string text = std::string(std::strerror(code)) + " (" + error.message() + ")";
    try {
      const py::object path =
          py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.where().path.c_str()));
      const py::object raised = py::reinterpret_borrow<py::object>(PyExc_OSError)(code, text, path);
      raised.attr("offset") = error.where().offset;
      raised.attr("expected") = error.where().expected;
      raised.attr("done") = error.where().done;
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    } catch (py::error_already_set& worse) {
      worse.restore();
    }
  }
}

// A file from Python's side: closing it lets go of the descriptors as soon as no transfer uses them.
class PyFile {
 public:
  explicit PyFile(std::shared_ptr<File> file) : file_(std::move(file)) {}

  const std::shared_ptr<File>& get() const {
    if (file_ == nullptr) throw py::value_error("the file is closed");
    return file_;
  }
  void close() { file_.reset(); }

 private:
  std::shared_ptr<File> file_;
};

// A transfer from Python's side. It holds the bytes until the transfer has let go of them.
class Future {
 public:
  Future(std::shared_ptr<Engine> engine, std::shared_ptr<Transfer> transfer, View view)
      : engine_(std::move(engine)), transfer_(std::move(transfer)), view_(std::move(view)) {}

  Future(const Future&) = delete;
  Future& operator=(const Future&) = delete;

  ~Future() {
    if (!engine_->owned_by_this_process()) {
      // In a forked child nothing will ever finish, and what threads of the parent wait on cannot be destroyed.
      new std::shared_ptr<Transfer>(std::move(transfer_));
      new std::shared_ptr<Engine>(std::move(engine_));
      return;
    }
    if (transfer_->finished()) return;
    py::gil_scoped_release released;
    engine_->cancel(transfer_);
    transfer_->wait_until(Clock::time_point::max());  // the memory must not go while the kernel may write to it
  }

  std::size_t wait(std::optional<double> timeout) {
    const Clock::time_point until = deadline_after(timeout);
    {
      py::gil_scoped_release released;
      wait_until(until);
    }
    view_.release();
    if (const auto error = transfer_->error()) throw IoError(*error);
    return transfer_->request().nbytes;
  }

  bool done() const { return transfer_->finished(); }

  bool cancel() {
    {
      py::gil_scoped_release released;
      engine_->cancel(transfer_);
      while (!transfer_->wait_until(Clock::now() + kPollEvery)) check_signals();
    }
    view_.release();
    return transfer_->error() != nullptr;
  }

  std::size_t done_bytes() const { return transfer_->done_bytes(); }

 private:
  static constexpr auto kPollEvery = std::chrono::milliseconds(50);
  // What a request gets, after its own deadline, to be taken back from the kernel.
  static constexpr auto kGrace = std::chrono::seconds(1);

  void wait_until(Clock::time_point until) {
    const Clock::time_point own = transfer_->request().deadline;
    const Clock::time_point give_up = own == Clock::time_point::max() ? own : own + kGrace;
    bool asked = false;
    while (!transfer_->wait_until(std::min({until, asked ? give_up : own, Clock::now() + kPollEvery}))) {
      const Clock::time_point now = Clock::now();
      if (!asked && now >= own) {
        transfer_->stop_code();  // records that it is too late, before the request to cancel records its reason
        engine_->cancel(transfer_);
        asked = true;
      }
      if (asked && now >= give_up) {
        throw transfer_->make_error(ETIMEDOUT, transfer_->done_bytes(), "the kernel does not let go of it");
      }
      if (now >= until) throw transfer_->make_error(ETIMEDOUT, transfer_->done_bytes(), "it goes on");
      check_signals();
    }
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Transfer> transfer_;
  View view_;
};

class PyEngine {
 public:
  explicit PyEngine(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  ~PyEngine() {
    if (!engine_->owned_by_this_process()) {
      new std::shared_ptr<Engine>(std::move(engine_));  // see Engine: must not be destroyed in a forked child
      return;
    }
    close();
  }

  std::unique_ptr<Future> submit(Kind kind, const PyFile& file, std::uint64_t offset, const py::object& buffer,
                                 std::optional<double> timeout, std::int64_t unit) {
    Request request;
    request.file = file.get();
    request.kind = kind;
    request.offset = offset;
    request.deadline = deadline_after(timeout);
    request.unit = unit;
    View view(buffer, kind == Kind::kRead);
    request.data = view.data();
    request.nbytes = view.nbytes();
    return std::make_unique<Future>(engine_, engine_->submit(std::move(request)), std::move(view));
  }

  int register_memory(const py::object& buffer) {
    View view(buffer, true);
    const int error = engine_->register_memory(view.data(), view.nbytes());
    if (error == 0) registered_.emplace(view.data(), std::move(view));
    return error;
  }

  void withdraw_memory(const py::object& buffer) {
    View view(buffer, true);
    engine_->withdraw_memory(view.data());
    registered_.erase(view.data());
  }

  void close() {
    if (!engine_->owned_by_this_process()) return;
    {
      py::gil_scoped_release released;
      engine_->close();
    }
    for (const auto& [data, view] : registered_) engine_->withdraw_memory(data);
    registered_.clear();
  }

  const Engine& engine() const { return *engine_; }

 private:
  std::shared_ptr<Engine> engine_;
  std::map<unsigned char*, View> registered_;  // the kernel knows these pages: they must stay
};

std::unique_ptr<PyEngine> make_engine(const std::string& kind, std::size_t depth, std::size_t block,
                                      std::shared_ptr<EventRing> events, std::shared_ptr<RandomFaults> faults) {
  EngineOptions options;
  options.depth = depth;
  if (block != 0) options.block = block;
  options.events = std::move(events);
  options.faults = std::move(faults);
  if (kind == "io_uring") return std::make_unique<PyEngine>(make_uring_engine(std::move(options)));
  if (kind == "threads") return std::make_unique<PyEngine>(make_thread_engine(std::move(options)));
  throw py::value_error("kind must be io_uring or threads, not " + kind);
}

std::chrono::nanoseconds from_seconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<long long>(seconds * 1e9));
}

}  // namespace
}  // namespace zerosharder::io

namespace zerosharder {

void bind_io(py::module_& m) {
  using namespace io;
  py::register_local_exception_translator(translate_io_error);
  m.attr("HAVE_LIBURING") = built_with_uring();

  py::class_<PyFile>(m, "File",
                     "A file for positioned I/O, past the page cache where the file system has O_DIRECT.")
      .def(py::init([](const py::object& path, bool write, bool create, bool truncate, bool direct) {
             PyObject* encoded = nullptr;
             if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw py::error_already_set();
             const auto bytes = py::reinterpret_steal<py::bytes>(encoded);
             return PyFile(
                 std::make_shared<File>(std::string(bytes), File::Options{write, create, truncate, direct}));
           }),
           py::arg("path"), py::kw_only(), py::arg("write") = false, py::arg("create") = false,
           py::arg("truncate") = false, py::arg("direct") = true)
      .def_property_readonly(
          "path", [](const PyFile& self) { return self.get()->path(); }, "As it was given.")
      .def_property_readonly(
          "direct", [](const PyFile& self) { return self.get()->direct(); },
          "Whether whole pages go past the page cache.")
      .def_property_readonly(
          "why_not_direct", [](const PyFile& self) { return self.get()->why_not_direct(); },
          "The reason if `direct` is False, else empty.")
      .def_property_readonly(
          "size", [](const PyFile& self) { return self.get()->size(); }, "Bytes in the file now.")
      .def(
          "reserve",
          [](const PyFile& self, std::uint64_t nbytes) {
            const std::shared_ptr<File> file = self.get();
            py::gil_scoped_release released;
            return file->reserve(nbytes);
          },
          py::arg("nbytes"), "Reserve disk space for the first bytes; False if only the length could be set.")
      .def(
          "sync",
          [](const PyFile& self) {
            const std::shared_ptr<File> file = self.get();
            py::gil_scoped_release released;
            file->sync();
          },
          "Wait until everything written is on the device.")
      .def("close", &PyFile::close, "Let go of the file, at once or when its last transfer has finished.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyFile& self, const py::args&) { self.close(); });

  py::class_<Future>(m, "Future", "A read or write on its way. It keeps the buffer until it has finished.")
      .def("wait", &Future::wait, py::arg("timeout") = py::none(),
           "Wait for the end; the bytes moved. OSError if it failed, TimeoutError after `timeout` seconds (it "
           "goes on).")
      .def(
          "result", [](Future& self) { return self.wait(std::nullopt); }, "The same as wait().")
      .def("done", &Future::done, "Whether it has finished, well or not.")
      .def("cancel", &Future::cancel,
           "End it and wait until the buffer is free; False if all bytes had been moved already.")
      .def_property_readonly("done_bytes", &Future::done_bytes, "Bytes moved so far.");

  py::class_<RandomFaults, std::shared_ptr<RandomFaults>>(m, "RandomFaults",
                                                          "What shall go wrong in an engine, for tests; seeded.")
      .def(py::init([](std::uint64_t seed, double again, double cut, double error, int code, std::uint64_t after,
                       double delay) {
             return std::make_shared<RandomFaults>(
                 RandomFaults::Options{seed, again, cut, error, code, after, from_seconds(delay)});
           }),
           py::arg("seed") = 0, py::kw_only(), py::arg("again") = 0.0, py::arg("cut") = 0.0,
           py::arg("error") = 0.0, py::arg("code") = EIO, py::arg("after") = 0, py::arg("delay") = 0.0);

  py::class_<PyEngine>(m, "Engine", "Carries out reads and writes: by threads, or through io_uring.")
      .def(py::init(&make_engine), py::arg("kind"), py::kw_only(), py::arg("depth") = 0, py::arg("block") = 0,
           py::arg("events") = py::none(), py::arg("faults") = py::none())
      .def(
          "read",
          [](PyEngine& self, const PyFile& file, std::uint64_t offset, const py::object& buffer,
             std::optional<double> timeout,
             std::int64_t unit) { return self.submit(Kind::kRead, file, offset, buffer, timeout, unit); },
          py::arg("file"), py::arg("offset"), py::arg("buffer"), py::kw_only(), py::arg("timeout") = py::none(),
          py::arg("unit") = 0, "Begin to fill the buffer from the file.")
      .def(
          "write",
          [](PyEngine& self, const PyFile& file, std::uint64_t offset, const py::object& buffer,
             std::optional<double> timeout,
             std::int64_t unit) { return self.submit(Kind::kWrite, file, offset, buffer, timeout, unit); },
          py::arg("file"), py::arg("offset"), py::arg("buffer"), py::kw_only(), py::arg("timeout") = py::none(),
          py::arg("unit") = 0, "Begin to write the buffer to the file.")
      .def("register_memory", &PyEngine::register_memory, py::arg("buffer"),
           "Tell the kernel of memory that many transfers will use; 0, or the errno of why it stays as it was.")
      .def("withdraw_memory", &PyEngine::withdraw_memory, py::arg("buffer"), "Undo register_memory.")
      .def("close", &PyEngine::close, "Cancel what has not begun, wait for the rest, end the threads.")
      .def_property_readonly(
          "kind", [](const PyEngine& self) { return self.engine().name(); }, "io_uring or threads.")
      .def_property_readonly(
          "depth", [](const PyEngine& self) { return self.engine().depth(); }, "Parts in flight at most.")
      .def_property_readonly(
          "block", [](const PyEngine& self) { return self.engine().block(); }, "Bytes of a part.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyEngine& self, const py::args&) { self.close(); });
}

}  // namespace zerosharder
