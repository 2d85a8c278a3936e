// SPDX-License-Identifier: Apache-2.0
//
// Transfers by a fixed number of threads that call pread and pwrite: works everywhere.

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "io/engine.h"
#include "memory/buffer.h"

namespace zerosharder::io {
namespace {

// Enough for the device to have a next request while a thread wakes up.
constexpr std::size_t kDefaultThreads = 4;
constexpr std::size_t kMaxThreads = 256;

// What the threads share.
class Workers {
 public:
  explicit Workers(const EngineOptions& options) : block_(options.block), faults_(options.faults) {}

  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::shared_ptr<Transfer>> queue;  // transfers with parts that nobody has taken
  bool closing = false;

  // Carries out one part, without the lock.
  void run(Transfer& transfer, Part part, std::optional<Buffer>& bounce) {
    while (part.at < part.end) {
      int code = transfer.stop_code();
      if (code != 0) return transfer.fail(code, part.at);
      const Request& request = transfer.request();
      const Piece piece =
          request.file->next_piece(transfer.offset_of(part.at), part.end - part.at, transfer.data_at(part.at));
      Fault fault;
      if (faults_ != nullptr) {
        fault = faults_->next(request.kind, transfer.offset_of(part.at), piece.nbytes);
        if (fault.delay.count() > 0) transfer.sleep_unless_stopped(fault.delay);
        code = transfer.stop_code();
        if (code != 0) return transfer.fail(code, part.at);
      }
      std::int64_t moved = fault.error != 0 ? -fault.error : move(transfer, part.at, piece, bounce);
      if (moved > 0 && static_cast<std::size_t>(moved) > fault.limit) {
        moved = static_cast<std::int64_t>(fault.limit);
      }
      switch (transfer.account(part, piece, moved)) {
        case Next::kGoOn:
          break;
        case Next::kRetry:
          if (moved == -EAGAIN) transfer.sleep_unless_stopped(Transfer::backoff(part.stalls));
          break;
        case Next::kStop:
          return;
      }
    }
  }

 private:
  // Bytes moved, or -errno.
  std::int64_t move(const Transfer& transfer, std::size_t at, const Piece& piece, std::optional<Buffer>& bounce) {
    const Request& request = transfer.request();
    const int fd = request.file->fd(piece.route);
    unsigned char* memory = transfer.data_at(at);
    const bool by_way = piece.route == Route::kBounce;
    if (by_way) {
      try {
        if (!bounce) bounce.emplace(block_, Buffer::Options{});
      } catch (const std::exception&) {
        return -ENOMEM;
      }
      memory = static_cast<unsigned char*>(bounce->data());
      if (request.kind == Kind::kWrite) std::memcpy(memory, transfer.data_at(at), piece.nbytes);
    }
    const auto offset = static_cast<off_t>(transfer.offset_of(at));
    const ssize_t moved = request.kind == Kind::kRead ? ::pread(fd, memory, piece.nbytes, offset)
                                                      : ::pwrite(fd, memory, piece.nbytes, offset);
    if (moved < 0) return -errno;
    if (by_way && request.kind == Kind::kRead) {
      std::memcpy(transfer.data_at(at), memory, static_cast<std::size_t>(moved));
    }
    return moved;
  }

  const std::size_t block_;
  const std::shared_ptr<FaultSource> faults_;
};

EngineOptions checked(EngineOptions options) {
  if (options.depth == 0) options.depth = kDefaultThreads;
  if (options.depth > kMaxThreads) {
    throw std::invalid_argument("at most " + std::to_string(kMaxThreads) + " threads, not " +
                                std::to_string(options.depth));
  }
  return options;
}

class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(EngineOptions options) : Engine(checked(std::move(options))), workers_(options_) {
    try {
      for (std::size_t i = 0; i < options_.depth; ++i) threads_.emplace_back([this] { loop(); });
    } catch (...) {
      close();  // the destructor does not run for an object whose constructor throws
      throw;
    }
  }

  ~ThreadEngine() override { close(); }

  void cancel(const std::shared_ptr<Transfer>& transfer) override {
    transfer->stop(ECANCELED);
    const std::lock_guard<std::mutex> lock(workers_.mutex);
    settle(transfer);
  }

  const char* name() const noexcept override { return "threads"; }

 protected:
  void shut_down() override {
    {
      const std::lock_guard<std::mutex> lock(workers_.mutex);
      workers_.closing = true;
      while (!workers_.queue.empty()) {
        const std::shared_ptr<Transfer> transfer = workers_.queue.front();
        transfer->stop(ECANCELED);
        settle(transfer);
      }
      workers_.work.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void enqueue(const std::shared_ptr<Transfer>& transfer) override {
    const std::size_t parts = transfer->request().nbytes / options_.block + 1;
    {
      const std::lock_guard<std::mutex> lock(workers_.mutex);
      if (workers_.closing) throw transfer->make_error(ESHUTDOWN, 0, "the I/O engine is closed");
      workers_.queue.push_back(transfer);
    }
    if (parts > 1) {
      workers_.work.notify_all();
    } else {
      workers_.work.notify_one();
    }
  }

 private:
  void loop() {
    Workers& shared = workers_;
    std::optional<Buffer> bounce;  // made when the first unaligned request comes
    std::unique_lock<std::mutex> lock(shared.mutex);
    for (;;) {
      shared.work.wait(lock, [&] { return shared.closing || !shared.queue.empty(); });
      if (shared.queue.empty()) return;  // closing
      const std::shared_ptr<Transfer> transfer = shared.queue.front();
      if (transfer->stop_code() != 0) {
        settle(transfer);
        continue;
      }
      const Part part = transfer->take_part(options_.block);
      if (transfer->issued_all()) shared.queue.pop_front();
      ++transfer->in_flight;
      lock.unlock();
      shared.run(*transfer, part, bounce);
      lock.lock();
      --transfer->in_flight;
      settle(transfer);
    }
  }

  // With the lock held: takes a stopped transfer out of the queue, and concludes one of which nothing is left.
  void settle(const std::shared_ptr<Transfer>& transfer) {
    if (!transfer->issued_all()) {
      if (transfer->stop_code() == 0) return;
      auto& queue = workers_.queue;
      const auto found = std::find(queue.begin(), queue.end(), transfer);
      if (found != queue.end()) queue.erase(found);
    }
    if (transfer->in_flight == 0 && !transfer->finished()) conclude(*transfer);
  }

  Workers workers_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(EngineOptions options) {
  return std::make_unique<ThreadEngine>(std::move(options));
}

}  // namespace zerosharder::io
