// SPDX-License-Identifier: Apache-2.0
//
// A fixed number of equal staging slots in one buffer. Whoever finds it empty waits in line instead of failing, so
// that a pool smaller than the work in flight makes the work slower and never wrong.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/buffer.h"

namespace zerosharder {

// All members may be called from any thread.
class SlotPool : public std::enable_shared_from_this<SlotPool> {
 public:
  using Clock = std::chrono::steady_clock;

  // The right to use one slot, given back on destruction. Keeps the pool alive. Move-only.
  class Slot {
   public:
    Slot() noexcept = default;
    Slot(Slot&& other) noexcept = default;
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { release(); }

    // Gives the slot back now. The next holder overwrites it: views of its bytes must not be used any more.
    void release() noexcept;

    explicit operator bool() const noexcept { return pool_ != nullptr; }
    void* data() const noexcept { return pool_ ? pool_->slot_data(index_) : nullptr; }
    std::size_t nbytes() const noexcept { return pool_ ? pool_->slot_bytes() : 0; }
    std::size_t index() const noexcept { return index_; }

   private:
    friend class SlotPool;
    Slot(std::shared_ptr<SlotPool> pool, std::size_t index) noexcept : pool_(std::move(pool)), index_(index) {}

    std::shared_ptr<SlotPool> pool_;
    std::size_t index_ = 0;
  };

  // `count` slots of `slot_bytes` each (both > 0, else std::invalid_argument). A slot starts on a page boundary,
  // so that direct I/O takes it as it is. Throws what Buffer throws.
  static std::shared_ptr<SlotPool> make(std::size_t slot_bytes, std::size_t count, Buffer::Options options);

  // Waits in line until a slot is free or `deadline` has passed; an empty Slot in the latter case. `poll` is
  // called every now and then while waiting, without a lock; what it throws ends the wait.
  Slot acquire_until(Clock::time_point deadline, const std::function<void()>& poll = nullptr);

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  std::size_t count() const noexcept { return count_; }
  std::size_t free_count() const;
  std::size_t waiting_count() const;
  const Buffer& buffer() const noexcept { return buffer_; }

 private:
  SlotPool(std::size_t slot_bytes, std::size_t count, std::size_t stride, Buffer buffer);

  void* slot_data(std::size_t index) const noexcept {
    return static_cast<unsigned char*>(buffer_.data()) + index * stride_;
  }
  void give_back(std::size_t index) noexcept;

  const std::size_t slot_bytes_;
  const std::size_t count_;
  const std::size_t stride_;  // slot_bytes_ up to the next page
  const Buffer buffer_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::size_t> free_;    // never grows beyond its capacity, count_
  std::vector<std::uint64_t> line_;  // tickets of those who wait, first come first
  std::uint64_t next_ticket_ = 0;
};

}  // namespace zerosharder
