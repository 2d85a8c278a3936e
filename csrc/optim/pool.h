// SPDX-License-Identifier: Apache-2.0
//
// The threads of the optimizer steps: a fixed number, parked on a condition variable between steps.

#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace zerosharder::optim {

// Runs numbered tasks on `threads` threads, the caller's among them. Any thread may call run(); calls take turns.
// After a fork the child has none of the threads: its first run() starts its own.
class ThreadPool {
 public:
  // 1 to kMaxThreads, else std::invalid_argument. std::system_error if a thread cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();  // waits for the run in progress, then for every thread to end

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls task(0) ... task(count - 1), each once, in any order; returns when all are done. Tasks must not throw.
  void run(std::size_t count, const std::function<void(std::size_t)>& task);

  int threads() const noexcept { return threads_; }

  static constexpr int kMaxThreads = 1024;

 private:
  struct Team;

  Team* team();

  const int threads_;
  std::atomic<Team*> team_;
};

}  // namespace zerosharder::optim
