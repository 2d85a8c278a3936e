// SPDX-License-Identifier: Apache-2.0

#include "optim/pool.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zerosharder::optim {

// All that does not survive a fork: threads, and locks that may have been held by them.
struct ThreadPool::Team {
  explicit Team(int threads) : owner(getpid()) {
    // Signals are for the interpreter's threads; new threads inherit the mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < threads; ++i) workers.emplace_back([this] { work(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Team() { stop(); }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  void work() {
    std::size_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || round != seen; });
      if (stopping) return;
      seen = round;
      lock.unlock();
      take_tasks();
      lock.lock();
      if (--busy == 0) finished.notify_one();
    }
  }

  void take_tasks() {
    for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      (*task)(i);
    }
  }

  void run(std::size_t tasks, const std::function<void(std::size_t)>& function) {
    const std::lock_guard<std::mutex> turn(turns);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      task = &function;
      count = tasks;
      next.store(0, std::memory_order_relaxed);
      busy = workers.size();
      ++round;
    }
    wake.notify_all();
    take_tasks();
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [&] { return busy == 0; });  // also: nobody reads `function` any more
  }

  const pid_t owner;
  std::mutex turns;  // held for a whole run
  std::mutex mutex;  // guards what follows, except `next`
  std::condition_variable wake, finished;
  const std::function<void(std::size_t)>* task = nullptr;
  std::size_t count = 0, round = 0, busy = 0;
  bool stopping = false;
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> workers;
};

namespace {

int checked(int threads) {
  if (threads < 1 || threads > ThreadPool::kMaxThreads) {
    throw std::invalid_argument("threads must be 1 to " + std::to_string(ThreadPool::kMaxThreads) + ", got " +
                                std::to_string(threads));
  }
  return threads;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(checked(threads)), team_(new Team(threads)) {}

ThreadPool::~ThreadPool() {
  Team* const team = team_.load();
  if (team->owner != getpid()) return;  // the parent's: its threads are not here to be joined
  {
    const std::lock_guard<std::mutex> last(team->turns);
  }
  delete team;
}

ThreadPool::Team* ThreadPool::team() {
  Team* current = team_.load();
  if (current->owner == getpid()) return current;
  // In a child. The old team is leaked: a lock of it may be held for ever, its threads do not exist.
  auto fresh = std::make_unique<Team>(threads_);
  if (team_.compare_exchange_strong(current, fresh.get())) return fresh.release();
  return current;  // another thread was faster; ours ends here
}

void ThreadPool::run(std::size_t count, const std::function<void(std::size_t)>& task) {
  if (count <= 1 || threads_ == 1) {  // not worth waking anybody; needs no lock either
    for (std::size_t i = 0; i < count; ++i) task(i);
    return;
  }
  team()->run(count, task);
}

}  // namespace zerosharder::optim
