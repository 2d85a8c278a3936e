// SPDX-License-Identifier: Apache-2.0

#include "observe/event_ring.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace zerosharder {

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::int32_t thread_id() noexcept {
  static thread_local const auto id = static_cast<std::int32_t>(::syscall(SYS_gettid));
  return id;
}

const char* event_name(EventKind kind) noexcept {
  switch (kind) {
    case EventKind::kRead:
      return "read";
    case EventKind::kWrite:
      return "write";
    case EventKind::kStep:
      return "step";
  }
  return "unknown";
}

EventRing::EventRing(std::size_t capacity) {
  std::size_t size = 2;
  while (size < capacity) size *= 2;
  mask_ = size - 1;
  cells_ = std::make_unique<Cell[]>(size);
  for (std::size_t i = 0; i < size; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
}

bool EventRing::push(const Event& event) noexcept {
  std::uint64_t position = head_.load(std::memory_order_relaxed);
  for (;;) {
    Cell& cell = cells_[position & mask_];
    const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == position) {
      if (head_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        cell.event = event;
        cell.turn.store(position + 1, std::memory_order_release);
        return true;
      }
    } else if (turn < position) {  // not read since the last time round
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return false;
    } else {
      position = head_.load(std::memory_order_relaxed);
    }
  }
}

bool EventRing::pop(Event& event) noexcept {
  std::uint64_t position = tail_.load(std::memory_order_relaxed);
  for (;;) {
    Cell& cell = cells_[position & mask_];
    const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == position + 1) {
      if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        event = cell.event;
        cell.turn.store(position + mask_ + 1, std::memory_order_release);
        return true;
      }
    } else if (turn < position + 1) {  // not written yet
      return false;
    } else {
      position = tail_.load(std::memory_order_relaxed);
    }
  }
}

}  // namespace zerosharder
