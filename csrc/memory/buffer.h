// SPDX-License-Identifier: Apache-2.0
//
// Anonymous host memory for shards, gathered units and staging.
//
// Why not malloc: the start has to lie on a 2 MiB boundary so that the kernel can back the buffer with huge
// pages from the first byte (a first touch is several times faster then), and whole pages have to be given back
// without giving up the address. Why not a pinned allocation of some framework: those round sizes up to a power of
// two, which is up to twice the memory.

#pragma once

#include <cstddef>
#include <cstdint>

namespace zerosharder {

// Bytes of one huge page, and the alignment of every buffer.
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Bytes of one ordinary page of the running kernel.
std::size_t page_size() noexcept;

// What all buffers of this process hold together, in bytes of whole pages.
struct MemoryCounters {
  std::uint64_t held = 0;    // mapped now, touched or not
  std::uint64_t locked = 0;  // of these, locked into RAM
  std::uint64_t peak = 0;    // the most that was ever held
};

MemoryCounters memory_counters() noexcept;

// Owns one private anonymous mapping. Move-only; a moved-from or default-constructed buffer owns nothing.
// Not synchronised: one thread at a time may call a non-const member.
class Buffer {
 public:
  struct Options {
    bool huge = false;      // advise the kernel to use huge pages; a refusal is not an error
    bool populate = false;  // touch every page now rather than at first use
    bool lock = false;      // lock into RAM, which populates; a refusal is not an error, see lock_error()
    unsigned threads = 0;   // that touch pages; 0: as many as there are usable cores, fewer for a small buffer
  };

  Buffer() noexcept = default;

  // Maps at least `nbytes` (> 0, else std::invalid_argument) of zeros. Throws std::system_error with the errno of
  // the call that failed; nothing stays mapped then. Blocks for the whole first touch if `populate` or `lock`.
  Buffer(std::size_t nbytes, Options options);

  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* data() const noexcept { return data_; }
  std::uintptr_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(data_); }

  // Bytes asked for. The mapping itself is longer, up to the next page boundary.
  std::size_t nbytes() const noexcept { return nbytes_; }
  std::size_t mapped_bytes() const noexcept { return mapped_; }

  // Whether the kernel took the advice. It says nothing on how many huge pages there are behind the buffer.
  bool huge() const noexcept { return huge_; }

  // Whether all of it is locked into RAM, and the errno of the refusal otherwise (0: not asked for).
  bool locked() const noexcept { return locked_; }
  int lock_error() const noexcept { return lock_error_; }

  // Gives all pages back to the kernel. Address and size stay; the content is zeros afterwards. Locked pages
  // cannot be given back: std::system_error with EINVAL then.
  void release_pages();

 private:
  void map(std::size_t length);
  void populate(unsigned threads);
  void unmap() noexcept;
  void swap(Buffer& other) noexcept;

  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t mapped_ = 0;
  bool huge_ = false;
  bool locked_ = false;
  int lock_error_ = 0;
};

}  // namespace zerosharder
