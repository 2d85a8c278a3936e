// SPDX-License-Identifier: Apache-2.0

#include "io/transfer.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace zerosharder::io {
namespace {

// About ten seconds of EAGAIN with the waits below. Without an end, a device that never takes anything would hang
// a request that has no deadline.
constexpr unsigned kMaxStalls = 2000;

}  // namespace

bool Transfer::finished() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_;
}

bool Transfer::wait_until(Clock::time_point deadline) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return finished_; });
}

void Transfer::stop(int code) noexcept {
  int expected = 0;
  if (!stop_code_.compare_exchange_strong(expected, code, std::memory_order_acq_rel)) return;
  const std::lock_guard<std::mutex> lock(mutex_);  // or a sleeper could miss it between its check and its wait
  changed_.notify_all();
}

int Transfer::stop_code() noexcept {
  const int code = stop_code_.load(std::memory_order_acquire);
  if (code != 0) return code;
  if (request_.deadline == Clock::time_point::max() || Clock::now() < request_.deadline) return 0;
  stop(ETIMEDOUT);
  return stop_code_.load(std::memory_order_acquire);
}

void Transfer::fail(int code, std::size_t at) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == 0) {
      error_ = code;
      error_at_ = at;
    }
  }
  stop(code);
}

Next Transfer::account(Part& part, const Piece& piece, std::int64_t moved) noexcept {
  if (moved > 0) {
    part.at += static_cast<std::size_t>(moved);
    part.stalls = 0;
    done_bytes_.fetch_add(static_cast<std::size_t>(moved), std::memory_order_relaxed);
    return Next::kGoOn;
  }
  const int code = moved == 0 ? (request_.kind == Kind::kRead ? ENODATA : EIO) : static_cast<int>(-moved);
  if (code == EINTR || code == EAGAIN) {
    if (++part.stalls <= kMaxStalls) return Next::kRetry;
  } else if (code == EINVAL && piece.route != Route::kBuffered) {
    request_.file->stop_direct("the file system refused an aligned transfer with O_DIRECT (EINVAL)");
    return Next::kRetry;
  }
  fail(code, part.at);
  return Next::kStop;
}

std::chrono::microseconds Transfer::backoff(unsigned stalls) noexcept {
  const unsigned doublings = std::min(stalls, 7u);
  return std::chrono::microseconds(stalls <= 1 ? 0 : 40u << doublings);  // up to 5 ms
}

void Transfer::sleep_unless_stopped(std::chrono::nanoseconds duration) {
  const auto end = std::min(Clock::now() + duration, request_.deadline);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, end, [this] { return stop_code_.load(std::memory_order_acquire) != 0; });
}

void Transfer::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Stopped, but too late to matter: all bytes are there.
  if (error_ == 0 && done_bytes() < request_.nbytes) {
    error_ = std::max(1, stop_code_.load(std::memory_order_acquire));
    error_at_ = issued_;
  }
  finished_ = true;
  changed_.notify_all();
}

Part Transfer::take_part(std::size_t block) noexcept {
  const std::size_t past = static_cast<std::size_t>(offset_of(issued_) % block);
  Part part;
  part.at = issued_;
  part.end = issued_ + std::min(block - past, request_.nbytes - issued_);
  issued_ = part.end;
  return part;
}

std::unique_ptr<IoError> Transfer::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == 0) return nullptr;
  return std::make_unique<IoError>(make_error(error_, error_at_, error_ == ENODATA ? "the file ends there" : ""));
}

IoError Transfer::make_error(int code, std::size_t at, const std::string& found) const {
  const std::size_t done = done_bytes();
  std::string text = request_.kind == Kind::kRead ? "read" : "write";
  text += " of " + std::to_string(request_.nbytes) + " bytes at offset " + std::to_string(request_.offset) +
          ", stopped at offset " + std::to_string(offset_of(at)) + ", " + std::to_string(done) + " bytes done";
  if (!found.empty()) text += "; " + found;
  return {code, text, {request_.file->path(), offset_of(at), request_.nbytes, done}};
}

}  // namespace zerosharder::io
