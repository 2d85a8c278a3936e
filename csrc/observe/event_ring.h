// SPDX-License-Identifier: Apache-2.0
//
// A bounded ring of events that any thread adds to without a lock and Python drains.
//
// The algorithm is Dmitry Vyukov's bounded multi-producer queue: each cell carries a sequence number that says
// whose turn it is. A full ring drops the new event and counts it; nobody who does I/O ever waits for a reader.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace zerosharder {

// CLOCK_MONOTONIC in nanoseconds, the clock of Python's time.perf_counter_ns.
std::int64_t monotonic_ns() noexcept;

// The kernel's number of the calling thread.
std::int32_t thread_id() noexcept;

enum class EventKind : std::uint8_t { kRead = 0, kWrite = 1, kStep = 2 };

// "read", "write", "step".
const char* event_name(EventKind kind) noexcept;

struct Event {
  EventKind kind = EventKind::kRead;
  std::int32_t thread = 0;
  std::int64_t unit = 0;      // the caller's own number of what this was done for
  std::uint64_t nbytes = 0;   // moved, also when the operation failed half way
  std::int64_t begin_ns = 0;  // monotonic_ns()
  std::int64_t end_ns = 0;
};

class EventRing {
 public:
  // `capacity` is taken up to the next power of two, at least 2.
  explicit EventRing(std::size_t capacity);

  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // Adds an event; false if the ring was full, which is counted.
  bool push(const Event& event) noexcept;

  // Takes the oldest event; false if there is none. Any number of threads may take.
  bool pop(Event& event) noexcept;

  std::size_t capacity() const noexcept { return mask_ + 1; }

  // Events lost since the ring was made.
  std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<std::uint64_t> turn{0};
    Event event;
  };

  std::size_t mask_;
  std::unique_ptr<Cell[]> cells_;
  // On cache lines of their own: producers and the reader would slow each other down otherwise.
  alignas(64) std::atomic<std::uint64_t> head_{0};  // next to push
  alignas(64) std::atomic<std::uint64_t> tail_{0};  // next to pop
  alignas(64) std::atomic<std::uint64_t> dropped_{0};
};

}  // namespace zerosharder
