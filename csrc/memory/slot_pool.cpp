// SPDX-License-Identifier: Apache-2.0

#include "memory/slot_pool.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace zerosharder {

SlotPool::Slot& SlotPool::Slot::operator=(Slot&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::move(other.pool_);
    index_ = other.index_;
  }
  return *this;
}

void SlotPool::Slot::release() noexcept {
  if (pool_ == nullptr) return;
  pool_->give_back(index_);
  pool_.reset();
}

std::shared_ptr<SlotPool> SlotPool::make(std::size_t slot_bytes, std::size_t count, Buffer::Options options) {
  if (slot_bytes == 0 || count == 0) throw std::invalid_argument("a pool needs at least one slot of one byte");
  const std::size_t page = page_size();
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 4;
  if (slot_bytes > kMost || count > kMost / (slot_bytes + page)) {
    throw std::system_error(ENOMEM, std::generic_category(), "slots of that number and size");
  }
  const std::size_t stride = (slot_bytes + page - 1) / page * page;
  // The last slot needs no padding: the pool is not a byte larger than its slots need.
  Buffer buffer(stride * (count - 1) + slot_bytes, options);
  return std::shared_ptr<SlotPool>(new SlotPool(slot_bytes, count, stride, std::move(buffer)));
}

SlotPool::SlotPool(std::size_t slot_bytes, std::size_t count, std::size_t stride, Buffer buffer)
    : slot_bytes_(slot_bytes), count_(count), stride_(stride), buffer_(std::move(buffer)) {
  free_.reserve(count);
  // Taken from the back: the first slot is handed out first, and again and again while it is warm in the cache.
  for (std::size_t i = count; i > 0; --i) free_.push_back(i - 1);
}

SlotPool::Slot SlotPool::acquire_until(Clock::time_point deadline, const std::function<void()>& poll) {
  constexpr auto kPollEvery = std::chrono::milliseconds(50);
  std::unique_lock<std::mutex> lock(mutex_);
  if (free_.empty() || !line_.empty()) {
    const std::uint64_t ticket = next_ticket_++;
    line_.push_back(ticket);
    const auto leave = [&] {
      line_.erase(std::find(line_.begin(), line_.end(), ticket));
      // Whoever leaves the line may have been the one that those behind waited for.
      changed_.notify_all();
    };
    const auto mine = [&] { return !free_.empty() && line_.front() == ticket; };
    while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kPollEvery), mine)) {
      if (Clock::now() >= deadline) {
        leave();
        return {};
      }
      if (!poll) continue;
      lock.unlock();
      try {
        poll();
      } catch (...) {
        lock.lock();
        leave();
        throw;
      }
      lock.lock();
    }
    leave();
  }
  const std::size_t index = free_.back();
  free_.pop_back();
  return {shared_from_this(), index};
}

std::size_t SlotPool::free_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return free_.size();
}

std::size_t SlotPool::waiting_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return line_.size();
}

void SlotPool::give_back(std::size_t index) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(index);
  changed_.notify_all();
}

}  // namespace zerosharder
