// SPDX-License-Identifier: Apache-2.0
//
// What carries out transfers. Two ways of doing it stand behind one interface, see thread_engine.h and
// uring_engine.h.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "io/faults.h"
#include "io/transfer.h"
#include "observe/event_ring.h"

namespace zerosharder::io {

struct EngineOptions {
  // Bytes of a piece at most. A request is cut at multiples of it and the parts travel side by side.
  std::size_t block = std::size_t{4} << 20;
  std::size_t depth =
      0;  // parts in flight at most: threads of the one, requests in the ring of the other; 0: default
  std::shared_ptr<EventRing> events;    // where finished transfers are recorded, may be null
  std::shared_ptr<FaultSource> faults;  // may be null
};

// All members may be called from any thread. The threads of an engine do not survive a fork: in the child,
// submit() says so, and neither close() nor the destructor may be called (they would wait for ever).
class Engine {
 public:
  virtual ~Engine() = default;

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Begins a transfer. The memory must stay until it is finished(). Requests begin in order and end in any.
  std::shared_ptr<Transfer> submit(Request request);

  // Asks for an early end. The memory is in use until the transfer is finished(), which may be at once, and takes
  // as long as the kernel takes for what it has begun.
  virtual void cancel(const std::shared_ptr<Transfer>& transfer) = 0;

  // Cancels all that has not begun, waits for the rest, ends the threads. Later submissions are refused
  // (ESHUTDOWN). Safe to call again. A derived class calls it in its destructor.
  void close();

  // Memory that many transfers will use, so that the kernel need not look up its pages each time. Returns 0, or
  // the errno of why it stays as it was (ENOTSUP: this engine has no use for it). The memory must stay until it is
  // withdrawn or the engine closed.
  virtual int register_memory(void* data, std::size_t nbytes);
  virtual void withdraw_memory(void* data);

  virtual const char* name() const noexcept = 0;
  std::size_t block() const noexcept { return options_.block; }
  std::size_t depth() const noexcept { return options_.depth; }
  bool owned_by_this_process() const noexcept;

 protected:
  explicit Engine(EngineOptions options);

  virtual void enqueue(const std::shared_ptr<Transfer>& transfer) = 0;
  virtual void shut_down() = 0;

  // Makes a transfer finished and records it. Only when nothing of it is in flight.
  void conclude(Transfer& transfer);

  EngineOptions options_;

 private:
  const pid_t owner_;
  std::mutex closing_;
  bool closed_ = false;
};

// Throws std::system_error if the kernel refuses threads.
std::unique_ptr<Engine> make_thread_engine(EngineOptions options);

// Throws std::system_error with the errno of the kernel's refusal; ENOSYS if the library was absent at build time.
std::unique_ptr<Engine> make_uring_engine(EngineOptions options);

// Whether liburing was there at build time.
bool built_with_uring() noexcept;

}  // namespace zerosharder::io
