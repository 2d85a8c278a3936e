// SPDX-License-Identifier: Apache-2.0
//
// One request to read or write a range of a file, what became of it, and the rules both engines share: short
// transfers go on, EINTR and EAGAIN are tried again, the first other error ends the request.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>

#include "io/file.h"

namespace zerosharder::io {

using Clock = std::chrono::steady_clock;

enum class Kind : std::uint8_t { kRead, kWrite };

// A failed request. what() says everything; the parts are there for programs.
class IoError : public std::system_error {
 public:
  struct Where {
    std::string path;
    std::uint64_t offset = 0;  // of the first byte that did not make it
    std::size_t expected = 0;  // bytes the request was for
    std::size_t done = 0;      // bytes that made it, anywhere in the range
  };

  IoError(int error, const std::string& message, Where where)
      : std::system_error(error, std::generic_category(), message), message_(message), where_(std::move(where)) {}

  const std::string& message() const noexcept { return message_; }  // without the text of the errno
  const Where& where() const noexcept { return where_; }

 private:
  std::string message_;
  Where where_;
};

struct Request {
  std::shared_ptr<File> file;
  Kind kind = Kind::kRead;
  std::uint64_t offset = 0;       // in the file
  unsigned char* data = nullptr;  // not written to by kWrite
  std::size_t nbytes = 0;
  Clock::time_point deadline = Clock::time_point::max();
  std::int64_t unit = 0;  // for the event log
};

// A stretch of a transfer that one worker, or one slot of a ring, carries out. Positions count from its start.
struct Part {
  std::size_t at = 0;
  std::size_t end = 0;
  unsigned stalls = 0;  // EAGAINs and EINTRs in a row
};

enum class Next : std::uint8_t { kGoOn, kRetry, kStop };

class Transfer {
 public:
  explicit Transfer(Request request) : request_(std::move(request)) {}

  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  const Request& request() const noexcept { return request_; }
  std::uint64_t offset_of(std::size_t at) const noexcept { return request_.offset + at; }
  unsigned char* data_at(std::size_t at) const noexcept { return request_.data + at; }

  // ---- For those who wait. Any thread.

  // Whether no part is in flight any more and none will be: the memory belongs to the caller again.
  bool finished() const;
  bool wait_until(Clock::time_point deadline) const;
  std::size_t done_bytes() const noexcept { return done_bytes_.load(std::memory_order_relaxed); }

  // What went wrong, as an exception to throw; nullptr if every byte made it. Only after finished().
  std::unique_ptr<IoError> error() const;

  // An error of this transfer with its place and counts; `found` says more if not empty.
  IoError make_error(int code, std::size_t at, const std::string& found) const;

  // ---- For engines.

  // Asks for an end with this errno; the first one counts. Parts in flight finish, no more are begun.
  void stop(int code) noexcept;

  // The errno asked for, ETIMEDOUT once the deadline has passed, 0 while it may go on.
  int stop_code() noexcept;

  // Records an error at a position; the first one counts. Stops the rest.
  void fail(int code, std::size_t at) noexcept;

  // What follows from one system call that moved so many bytes or returned -errno; advances `part`.
  Next account(Part& part, const Piece& piece, std::int64_t moved) noexcept;

  // How long to wait before the next attempt after that many stalls in a row.
  static std::chrono::microseconds backoff(unsigned stalls) noexcept;

  // Sleeps, shorter if the transfer is stopped meanwhile.
  void sleep_unless_stopped(std::chrono::nanoseconds duration);

  void finish();

  // The next stretch that ends at a multiple of `block` in the file. Only while !issued_all().
  Part take_part(std::size_t block) noexcept;
  bool issued_all() const noexcept { return issued_ == request_.nbytes; }

  // Guarded by the engine: parts given to a worker or the kernel and not back yet, and when the first one was.
  std::size_t in_flight = 0;
  std::int64_t begin_ns = 0;

  // Bytes handed out as parts; guarded by the engine.
  std::size_t issued() const noexcept { return issued_; }

 private:
  const Request request_;
  std::size_t issued_ = 0;

  std::atomic<std::size_t> done_bytes_{0};
  std::atomic<int> stop_code_{0};

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool finished_ = false;
  int error_ = 0;
  std::size_t error_at_ = 0;
};

}  // namespace zerosharder::io
