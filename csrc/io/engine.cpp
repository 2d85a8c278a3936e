// SPDX-License-Identifier: Apache-2.0

#include "io/engine.h"

#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace zerosharder::io {

Engine::Engine(EngineOptions options) : options_(std::move(options)), owner_(::getpid()) {
  // One system call moves less than 2 GiB, and blocks must be cut at page boundaries.
  constexpr std::size_t kMost = std::size_t{1} << 30;
  if (options_.block < 4096 || options_.block > kMost || (options_.block & (options_.block - 1)) != 0) {
    throw std::invalid_argument("block must be a power of two from 4096 to 2**30, not " +
                                std::to_string(options_.block));
  }
}

bool Engine::owned_by_this_process() const noexcept { return ::getpid() == owner_; }

std::shared_ptr<Transfer> Engine::submit(Request request) {
  constexpr auto kLast = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (request.offset > kLast || request.nbytes > kLast - request.offset) {
    throw std::invalid_argument("offset and size exceed 2**63 - 1 bytes");
  }
  auto transfer = std::make_shared<Transfer>(std::move(request));
  if (!owned_by_this_process()) {
    throw transfer->make_error(ECHILD, 0, "the I/O engine belongs to the parent process; make one after the fork");
  }
  if (transfer->request().kind == Kind::kWrite && !transfer->request().file->writable()) {
    throw transfer->make_error(EBADF, 0, "the file is open for reading only");
  }
  transfer->begin_ns = monotonic_ns();
  if (transfer->request().nbytes == 0) {
    conclude(*transfer);
  } else {
    enqueue(transfer);
  }
  return transfer;
}

void Engine::close() {
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_) return;
  shut_down();
  closed_ = true;
}

void Engine::conclude(Transfer& transfer) {
  if (options_.events != nullptr) {
    const Request& request = transfer.request();
    Event event;
    event.kind = request.kind == Kind::kRead ? EventKind::kRead : EventKind::kWrite;
    event.thread = thread_id();
    event.unit = request.unit;
    event.nbytes = transfer.done_bytes();
    event.begin_ns = transfer.begin_ns;
    event.end_ns = monotonic_ns();
    options_.events->push(event);
  }
  transfer.finish();
}

int Engine::register_memory(void*, std::size_t) { return ENOTSUP; }

void Engine::withdraw_memory(void*) {}

}  // namespace zerosharder::io
