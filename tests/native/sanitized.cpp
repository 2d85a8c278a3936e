// SPDX-License-Identifier: Apache-2.0
//
// Drives the native parts from several threads, without Python: built and run with sanitizers by `make sanitize`,
// which find what no result shows (races, leaks, reads of freed memory). It compares with a model all the same.
//
//   sanitized FOLDER      exit status 0 if all went well

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "io/crc32c.h"
#include "io/device_lock.h"
#include "io/engine.h"
#include "io/faults.h"
#include "io/file.h"
#include "io/store.h"
#include "io/striping.h"
#include "memory/buffer.h"
#include "memory/slot_pool.h"
#include "observe/event_ring.h"

using namespace zerosharder;
using namespace zerosharder::io;
using std::chrono::milliseconds;

namespace {

void check(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

using Make = std::unique_ptr<Engine> (*)(EngineOptions);

std::shared_ptr<File> open_file(const std::string& folder, bool direct) {
  File::Options options;
  options.write = options.create = options.truncate = true;
  options.direct = direct;
  return std::make_shared<File>(folder + "/sanitized.bin", options);
}

Request request(const std::shared_ptr<File>& file, Kind kind, std::uint64_t offset, void* data,
                std::size_t nbytes) {
  Request made;
  made.file = file;
  made.kind = kind;
  made.offset = offset;
  made.data = static_cast<unsigned char*>(data);
  made.nbytes = nbytes;
  return made;
}

void wait(Transfer& transfer) {
  check(transfer.wait_until(Clock::now() + std::chrono::seconds(120)), "a transfer never ends");
}

void finish(Transfer& transfer) {
  wait(transfer);
  if (const auto error = transfer.error()) throw IoError(*error);
}

// Several threads use one engine, each on a stretch of the file of its own; every read is compared with a model.
void several_users(Make make, const std::string& folder, bool direct, bool faulty) {
  constexpr std::size_t kStretch = 300'000;
  constexpr int kUsers = 3;
  EngineOptions options;
  options.block = 16384;
  options.depth = 3;
  options.events = std::make_shared<EventRing>(64);
  if (faulty) {
    RandomFaults::Options chances;
    chances.again = 0.1;
    chances.cut = 0.3;
    options.faults = std::make_shared<RandomFaults>(chances);
  }
  const auto file = open_file(folder, direct);
  file->reserve(kUsers * kStretch);
  const auto engine = make(options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> users;
  for (int user = 0; user < kUsers; ++user) {
    users.emplace_back([&, user] {
      try {
        std::mt19937 random(static_cast<unsigned>(user));
        std::vector<unsigned char> model(kStretch, 0);
        std::vector<unsigned char> data(kStretch + 1);
        for (int i = 0; i < 40; ++i) {
          const std::size_t begin = random() % kStretch;
          const std::size_t nbytes = random() % (kStretch - begin + 1);
          unsigned char* memory = data.data() + random() % 2;
          const std::uint64_t offset = static_cast<std::uint64_t>(user) * kStretch + begin;
          if (random() % 2 == 0) {
            for (std::size_t j = 0; j < nbytes; ++j) memory[j] = static_cast<unsigned char>(random());
            finish(*engine->submit(request(file, Kind::kWrite, offset, memory, nbytes)));
            std::copy(memory, memory + nbytes, model.begin() + static_cast<std::ptrdiff_t>(begin));
          } else {
            finish(*engine->submit(request(file, Kind::kRead, offset, memory, nbytes)));
            if (nbytes != 0 && std::memcmp(memory, model.data() + begin, nbytes) != 0) ++wrong;
          }
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "user %d: %s\n", user, error.what());
        ++wrong;
      }
    });
  }
  Event event;
  for (int i = 0; i < 100; ++i) {
    while (options.events->pop(event)) {
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (std::thread& user : users) user.join();
  check(wrong == 0, "a read gave other bytes than were written, or failed");
}

// Requests are cancelled from another thread, end at deadlines, or are left in flight when the engine closes.
void early_ends(Make make, const std::string& folder) {
  const auto file = open_file(folder, true);
  Buffer buffer(std::size_t{4} << 20, {true, true, false, 2});
  std::memset(buffer.data(), 7, buffer.nbytes());
  for (int round = 0; round < 10; ++round) {
    EngineOptions options;
    options.block = 64 << 10;
    options.depth = 4;
    RandomFaults::Options chances;
    chances.seed = static_cast<std::uint64_t>(round);
    chances.again = 0.1;
    chances.delay = std::chrono::microseconds(round * 50);
    options.faults = std::make_shared<RandomFaults>(chances);
    auto engine = make(options);
    engine->register_memory(buffer.data(), buffer.nbytes());
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int i = 0; i < 6; ++i) {
      Request made = request(file, Kind::kWrite, 0, buffer.data(), buffer.nbytes());
      if (i % 3 == 1) made.deadline = Clock::now() + std::chrono::microseconds(500);
      transfers.push_back(engine->submit(std::move(made)));
    }
    std::thread other([&] {
      for (std::size_t i = 0; i < transfers.size(); i += 3) engine->cancel(transfers[i]);
    });
    std::thread third([&] { engine->cancel(transfers[3]); });
    if (round % 2 == 0) finish(*transfers[2]);
    other.join();
    third.join();
    engine->close();
    for (const auto& transfer : transfers) {
      wait(*transfer);
      const auto error = transfer->error();
      const int code = error ? error->code().value() : 0;
      check(code == 0 || code == ECANCELED || code == ETIMEDOUT, "ended with an unexpected errno");
    }
    bool refused = false;
    try {
      engine->submit(request(file, Kind::kRead, 0, buffer.data(), 1));
    } catch (const IoError& error) {
      refused = error.code().value() == ESHUTDOWN;
    }
    check(refused, "a closed engine took a request");
  }
}

void staging() {
  const auto pool = SlotPool::make(5000, 2, {});
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::atomic<int> timeouts{0};
  std::vector<std::thread> users;
  for (int user = 0; user < 5; ++user) {
    users.emplace_back([&, user] {
      for (int i = 0; i < 200; ++i) {
        const auto patience = user == 4 ? std::chrono::microseconds(50) : std::chrono::microseconds(10'000'000);
        SlotPool::Slot slot = pool->acquire_until(SlotPool::Clock::now() + patience, [] {});
        if (!slot) {
          ++timeouts;
          continue;
        }
        const int now = ++inside;
        int seen = most.load();
        while (now > seen && !most.compare_exchange_weak(seen, now)) {
        }
        std::memset(slot.data(), user, slot.nbytes());  // unguarded: a race if two held one slot
        --inside;
      }
    });
  }
  for (std::thread& user : users) user.join();
  check(most <= 2 && pool->free_count() == 2 && pool->waiting_count() == 0, "slots were lost or doubled");
}

void events() {
  constexpr int kEach = 20'000;
  EventRing ring(128);
  std::atomic<bool> done{false};
  std::vector<std::int64_t> last(4, -1);
  std::uint64_t seen = 0;
  bool ordered = true;
  const auto take = [&] {
    Event event;
    while (ring.pop(event)) {
      ++seen;
      const auto who = static_cast<std::size_t>(event.unit);
      ordered =
          ordered && event.begin_ns > last[who] && event.nbytes == static_cast<std::uint64_t>(event.begin_ns);
      last[who] = event.begin_ns;
    }
  };
  std::thread reader([&] {
    while (!done) take();
    take();
  });
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = 0; i < kEach; ++i) {
        ring.push({EventKind::kStep, 0, writer, static_cast<std::uint64_t>(i), i, i + 1});
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  done = true;
  reader.join();
  check(ordered, "events of one thread came out of order or torn");
  check(seen + ring.dropped() == 4 * kEach, "events were lost without being counted");
}

std::string last_error(const std::shared_ptr<Operation>& operation) {
  operation->wait_until(Clock::time_point::max());
  try {
    if (operation->error() != nullptr) std::rethrow_exception(operation->error());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Users write and read their own stretches of one store with checksums, whose stripes are shared by neighbours;
// then operations are cancelled, and the engine closes under the store.
void store(Make make, const std::string& folder) {
  constexpr int kUsers = 3;
  constexpr std::size_t kStretch = 30'011;
  EngineOptions options;
  options.block = 4096;
  options.depth = 3;
  RandomFaults::Options chances;
  chances.again = 0.1;
  chances.cut = 0.3;
  options.faults = std::make_shared<RandomFaults>(chances);
  const std::shared_ptr<Engine> engine = make(options);
  BlockStore::Options how;
  how.nbytes = kUsers * kStretch;
  how.folders = {folder, folder, folder};
  how.shares = {2, 1, 1};
  how.stripe = 4096;
  how.checksums = true;
  BlockStore bytes(engine, how);
  std::atomic<int> wrong{0};
  std::vector<std::thread> users;
  for (int user = 0; user < kUsers; ++user) {
    users.emplace_back([&, user] {
      std::mt19937 random(static_cast<unsigned>(user));
      std::vector<unsigned char> model(kStretch, 0), data(kStretch);
      for (int i = 0; i < 40; ++i) {
        const std::size_t begin = random() % kStretch;
        const Span span{user * kStretch + begin, data.data(), random() % (kStretch - begin + 1)};
        if (random() % 2 == 0) {
          for (std::size_t j = 0; j < span.nbytes; ++j) data[j] = static_cast<unsigned char>(random());
          const auto operation = bytes.write(span, user);
          if (!last_error(operation).empty()) ++wrong;
          std::copy_n(data.begin(), span.nbytes, model.begin() + static_cast<std::ptrdiff_t>(begin));
        } else {
          const auto operation = bytes.read(span, user);
          std::thread other([&] { operation->wait_until(Clock::time_point::max()); });  // both may look first
          if (!last_error(operation).empty()) ++wrong;
          other.join();
          if (span.nbytes != 0 && std::memcmp(data.data(), model.data() + begin, span.nbytes) != 0) ++wrong;
        }
      }
    });
  }
  for (std::thread& user : users) user.join();
  check(wrong == 0, "a store gave other bytes than were written, or failed");

  std::vector<unsigned char> data(how.nbytes, 5);
  for (int i = 0; i < 5; ++i) {
    const auto operation = bytes.write({0, data.data(), data.size()}, 0);
    if (i != 4) operation->cancel();
    if (i == 4) engine->close();
    const std::string error = last_error(operation);
    check(error.empty() || error.find("of the store") != std::string::npos, "an error without its place");
  }
  int refused = 0;
  for (const std::uint64_t offset : {std::uint64_t{0}, how.nbytes, ~std::uint64_t{0}}) {
    try {
      bytes.read({offset, data.data(), 1}, 0);
    } catch (const IoError& error) {
      refused += error.code().value() == (offset == 0 ? ESHUTDOWN : EINVAL);
    }
  }
  check(refused == 3, "a closed engine or a span outside");
}

void engines(const char* name, Make make, const std::string& folder) {
  for (const bool direct : {true, false}) {
    for (const bool faulty : {false, true}) several_users(make, folder, direct, faulty);
  }
  early_ends(make, folder);
  store(make, folder);
  std::printf("%s: passed\n", name);
}

// Both ways to a checksum, a split by shares that covers every byte once, and a lock whose owner is killed.
void parts_of_a_store(const std::string& folder) {
  check(crc32c("123456789", 9) == 0xe3069283u, "crc32c of the check string");
  std::vector<unsigned char> data(4099);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 131 >> 3);
  for (std::size_t n = 0; n + 7 < data.size(); n += 13) {
    const unsigned char* begin = data.data() + n % 7;
    check(crc32c(begin, n) == crc32c_portable(begin, n), "instruction and tables differ");
  }

  constexpr std::size_t kBytes = 1'000'003, kStripe = 4096;
  const Striping striping(kBytes, {3, 1}, kStripe);
  check(striping.length(0) + striping.length(1) == kBytes, "bytes of the folders");
  check(striping.length(0) * 4 + 4 * kStripe >= kBytes * 3 && striping.length(0) * 4 <= kBytes * 3 + 4 * kStripe,
        "a split further than a stripe from the shares");
  std::vector<std::vector<bool>> seen{std::vector<bool>(striping.length(0)),
                                      std::vector<bool>(striping.length(1))};
  for (const Extent& extent : striping.extents(0, kBytes)) {
    for (std::size_t i = 0; i < extent.nbytes; ++i) {
      check(!seen.at(extent.folder).at(extent.file_offset + i), "two bytes in one place");
      seen[extent.folder][extent.file_offset + i] = true;
    }
  }

  const auto lock = DeviceLock::open(folder + "/lock");
  int ends[2];
  check(::pipe(ends) == 0, "pipe");
  const pid_t holder = ::fork();
  if (holder == 0) {
    const char held = lock->try_lock() ? 'y' : 'n';
    if (::write(ends[1], &held, 1) == 1) ::pause();
    ::_exit(0);
  }
  char held = 0;
  check(::read(ends[0], &held, 1) == 1 && held == 'y' && !lock->try_lock(), "a lock held by another process");
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  check(lock->try_lock() && !lock->try_lock(), "a lock whose owner was killed");
  lock->unlock();
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    parts_of_a_store(argv[1]);
    staging();
    events();
    std::printf("parts of a store, slots and events: passed\n");
    engines("threads", make_thread_engine, argv[1]);
    try {
      make_uring_engine({});
    } catch (const std::system_error& error) {
      std::printf("io_uring: not run, %s\n", error.what());
      return 0;
    }
    engines("io_uring", make_uring_engine, argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
  return 0;
}
