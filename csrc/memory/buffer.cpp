// SPDX-License-Identifier: Apache-2.0

#include "memory/buffer.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

// Linux 5.14. Older headers lack the name although the running kernel may know the advice.
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

namespace zerosharder {
namespace {

// A thread costs tens of microseconds; below this many bytes each it does not pay.
constexpr std::size_t kBytesPerThread = std::size_t{16} << 20;

std::atomic<std::uint64_t> held_bytes{0};
std::atomic<std::uint64_t> locked_bytes{0};
std::atomic<std::uint64_t> peak_bytes{0};

void count_mapped(std::size_t nbytes) noexcept {
  const std::uint64_t now = held_bytes.fetch_add(nbytes, std::memory_order_relaxed) + nbytes;
  std::uint64_t peak = peak_bytes.load(std::memory_order_relaxed);
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

[[noreturn]] void fail(int error, const char* call, std::size_t nbytes) {
  throw std::system_error(error, std::generic_category(),
                          std::string(call) + " of " + std::to_string(nbytes) + " bytes");
}

unsigned usable_cores() noexcept {
#ifdef __linux__
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Touches [begin, begin + nbytes); returns 0 or an errno.
int touch(unsigned char* begin, std::size_t nbytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  int result = 0;
  do {
    result = ::madvise(begin, nbytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
#endif
  // The kernel does not know the advice. The mapping is fresh, so storing zeros changes nothing.
  auto* bytes = static_cast<volatile unsigned char*>(begin);
  for (std::size_t i = 0; i < nbytes; i += page_size()) bytes[i] = 0;
  return 0;
}

}  // namespace

std::size_t page_size() noexcept {
  static const std::size_t size = [] {
    const long answer = ::sysconf(_SC_PAGESIZE);
    return answer > 0 ? static_cast<std::size_t>(answer) : std::size_t{4096};
  }();
  return size;
}

MemoryCounters memory_counters() noexcept {
  return {held_bytes.load(std::memory_order_relaxed), locked_bytes.load(std::memory_order_relaxed),
          peak_bytes.load(std::memory_order_relaxed)};
}

Buffer::Buffer(std::size_t nbytes, Options options) {
  if (nbytes == 0) throw std::invalid_argument("a buffer needs at least 1 byte");
  const std::size_t page = page_size();
  // The sums below must not wrap; no kernel maps half of the address space anyway.
  if (nbytes > std::numeric_limits<std::size_t>::max() / 2 - kHugePage) fail(ENOMEM, "mmap", nbytes);
  nbytes_ = nbytes;
  map((nbytes + page - 1) / page * page);
  try {
#ifdef MADV_HUGEPAGE
    if (options.huge) huge_ = ::madvise(data_, mapped_, MADV_HUGEPAGE) == 0;
#endif
    // mlock would touch the pages, too, but with one thread.
    if (options.populate || options.lock) populate(options.threads);
  } catch (...) {
    unmap();  // the destructor does not run for an object whose constructor throws
    throw;
  }
  if (options.lock) {
    locked_ = ::mlock(data_, mapped_) == 0;
    if (locked_) {
      locked_bytes.fetch_add(mapped_, std::memory_order_relaxed);
    } else {
      lock_error_ = errno;
      ::munlock(data_, mapped_);  // a refusal half way may have locked some
    }
  }
}

Buffer::Buffer(Buffer&& other) noexcept { swap(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  Buffer taken(std::move(other));
  swap(taken);
  return *this;
}

Buffer::~Buffer() { unmap(); }

void Buffer::swap(Buffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(huge_, other.huge_);
  std::swap(locked_, other.locked_);
  std::swap(lock_error_, other.lock_error_);
}

void Buffer::map(std::size_t length) {
  // mmap promises page alignment only: reserve one huge page more, then cut both ends off.
  const std::size_t reserved = length + kHugePage;
  void* raw = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) fail(errno, "mmap", nbytes_);

  const auto begin = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (begin + kHugePage - 1) & ~std::uintptr_t{kHugePage - 1};
  const std::size_t head = aligned - begin;
  const std::size_t tail = reserved - head - length;
  // Cutting can fail only for want of map entries (ENOMEM). Give back the whole then, untouched.
  if ((head > 0 && ::munmap(raw, head) != 0) ||
      (tail > 0 && ::munmap(reinterpret_cast<void*>(aligned + length), tail) != 0)) {
    const int error = errno;
    ::munmap(raw, reserved);
    fail(error, "munmap while aligning a mapping", nbytes_);
  }
  data_ = reinterpret_cast<void*>(aligned);
  mapped_ = length;
  count_mapped(mapped_);
}

void Buffer::populate(unsigned threads) {
  const std::size_t useful = std::max<std::size_t>(1, mapped_ / kBytesPerThread);
  const std::size_t count = std::min<std::size_t>(threads > 0 ? threads : usable_cores(), useful);
  // Cut at huge pages: two threads on one of them would wait for each other.
  const std::size_t share = (mapped_ / count + kHugePage - 1) / kHugePage * kHugePage;
  auto* bytes = static_cast<unsigned char*>(data_);

  std::atomic<int> error{0};
  auto work = [&](std::size_t begin) {
    const int result = touch(bytes + begin, std::min(share, mapped_ - begin));
    if (result != 0) error.store(result, std::memory_order_relaxed);
  };
  std::vector<std::thread> helpers;
  std::size_t next = std::min(share, mapped_);
  try {
    for (; next < mapped_; next += share) helpers.emplace_back(work, next);
  } catch (const std::system_error&) {
    // No more threads to be had: this one does the rest.
  }
  work(0);
  for (; next < mapped_; next += share) work(next);
  for (std::thread& helper : helpers) helper.join();
  if (error.load() != 0) fail(error.load(), "populating", nbytes_);
}

void Buffer::release_pages() {
  if (data_ == nullptr) return;
  if (::madvise(data_, mapped_, MADV_DONTNEED) != 0) fail(errno, "releasing the pages", nbytes_);
}

void Buffer::unmap() noexcept {
  if (data_ == nullptr) return;
  ::munmap(data_, mapped_);  // unlocks, too; fails for bad arguments only, and these came from mmap
  held_bytes.fetch_sub(mapped_, std::memory_order_relaxed);
  if (locked_) locked_bytes.fetch_sub(mapped_, std::memory_order_relaxed);
  data_ = nullptr;
}

}  // namespace zerosharder
