// SPDX-License-Identifier: Apache-2.0
//
// Anonymous host memory for shards and gathered units.
//
// Why not malloc: the start has to lie on a 2 MiB boundary so that the kernel can back the buffer with huge
// pages from the first byte (a first touch is several times faster then), and whole pages have to be given back
// without giving up the address.

#pragma once

#include <cstddef>
#include <cstdint>

namespace zerosharder {

// Bytes of one huge page, and the alignment of every buffer.
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Bytes of one ordinary page of the running kernel.
std::size_t page_size() noexcept;

// Owns one private anonymous mapping. Move-only; a moved-from or default-constructed buffer owns nothing.
// Not synchronised: one thread at a time may call a non-const member.
class Buffer {
 public:
  struct Options {
    bool huge = false;      // advise the kernel to use huge pages; a refusal is not an error
    bool populate = false;  // touch every page now rather than at first use
  };

  Buffer() noexcept = default;

  // Maps at least `nbytes` (> 0, else std::invalid_argument) of zeros. Throws std::system_error with the errno of
  // the call that failed; nothing stays mapped then. Blocks for the whole first touch if `populate`.
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

  // Gives all pages back to the kernel. Address and size stay; the content is zeros afterwards.
  void release_pages();

 private:
  void map(std::size_t length);
  void populate();
  void unmap() noexcept;

  void* data_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t mapped_ = 0;
  bool huge_ = false;
};

}  // namespace zerosharder
