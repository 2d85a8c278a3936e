// SPDX-License-Identifier: Apache-2.0

#include "memory/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

// Linux 5.14. Older headers lack the name although the running kernel may know the advice.
#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

namespace zerosharder {
namespace {

[[noreturn]] void fail(int error, const char* call, std::size_t nbytes) {
  throw std::system_error(error, std::generic_category(),
                          std::string(call) + " of " + std::to_string(nbytes) + " bytes");
}

}  // namespace

std::size_t page_size() noexcept {
  static const std::size_t size = [] {
    const long answer = ::sysconf(_SC_PAGESIZE);
    return answer > 0 ? static_cast<std::size_t>(answer) : std::size_t{4096};
  }();
  return size;
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
    if (options.populate) populate();
  } catch (...) {
    unmap();  // the destructor does not run for an object whose constructor throws
    throw;
  }
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      huge_(std::exchange(other.huge_, false)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
    mapped_ = std::exchange(other.mapped_, 0);
    huge_ = std::exchange(other.huge_, false);
  }
  return *this;
}

Buffer::~Buffer() { unmap(); }

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
}

void Buffer::populate() {
#ifdef MADV_POPULATE_WRITE
  int result = 0;
  do {
    result = ::madvise(data_, mapped_, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return;
  if (errno != EINVAL && errno != ENOSYS) fail(errno, "populating", nbytes_);
#endif
  // The kernel does not know the advice. The mapping is fresh, so storing zeros changes nothing.
  auto* bytes = static_cast<volatile unsigned char*>(data_);
  for (std::size_t i = 0; i < mapped_; i += page_size()) bytes[i] = 0;
}

void Buffer::release_pages() {
  if (data_ == nullptr) return;
  if (::madvise(data_, mapped_, MADV_DONTNEED) != 0) fail(errno, "releasing the pages", nbytes_);
}

void Buffer::unmap() noexcept {
  if (data_ == nullptr) return;
  ::munmap(data_, mapped_);  // fails for bad arguments only, and these came from mmap
  data_ = nullptr;
}

}  // namespace zerosharder
