// SPDX-License-Identifier: Apache-2.0
//
// A file with one or two descriptors: one through the page cache, and one with O_DIRECT where the file system has
// it.
//
// A request is cut into a ragged head, whole pages and a ragged tail. Whole pages go past the page cache; the
// ragged ends go through it. Both may be used on one file because a page is only ever written one way by a
// request, and the kernel itself writes back and drops cached pages under a direct transfer. So nothing is padded,
// and a file is never longer than what was written to it.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace zerosharder::io {

// Owns a file descriptor. Move-only.
class Descriptor {
 public:
  Descriptor() noexcept = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~Descriptor() { reset(-1); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd) noexcept;

  int fd_ = -1;
};

// How one piece of a request travels.
enum class Route : std::uint8_t {
  kDirect,    // between the caller's memory and the device
  kBounce,    // directly, by way of an aligned buffer: the caller's memory is not aligned
  kBuffered,  // through the page cache
};

struct Piece {
  Route route = Route::kBuffered;
  std::size_t nbytes = 0;
};

class File {
 public:
  struct Options {
    bool write = false;     // open for reading and writing rather than for reading
    bool create = false;    // make it if it is not there, with mode 0600
    bool truncate = false;  // make it empty
    bool direct = true;     // use O_DIRECT where the file system has it
    bool unnamed =
        false;  // the path is a folder: make a file in it that has no name and goes with its descriptors
  };

  // Throws std::system_error with the path in its text.
  File(std::string path, Options options);

  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept { return path_; }
  bool writable() const noexcept { return writable_; }

  // Whether whole pages go past the page cache, and if not, why ("" if they do).
  bool direct() const noexcept { return direct_.load(std::memory_order_acquire); }
  std::string why_not_direct() const;

  // The file system took O_DIRECT at open and then refused an aligned transfer: use the page cache from now on.
  void stop_direct(const std::string& why);

  // Multiples of this (bytes, a power of two) are what offsets of direct pieces are.
  std::size_t granule() const noexcept { return granule_; }

  // The next piece of a request whose rest is `left` > 0 bytes at `offset` from or to `data`.
  Piece next_piece(std::uint64_t offset, std::size_t left, const void* data) const noexcept;

  int fd(Route route) const noexcept { return route == Route::kBuffered ? buffered_fd_.get() : direct_fd_.get(); }

  // Bytes in the file now.
  std::uint64_t size() const;

  // Reserves disk space for the first `nbytes` and makes the file that long; ENOSPC now rather than at a write.
  // Where the file system cannot reserve (EOPNOTSUPP), only the length is set. Returns whether space was reserved.
  bool reserve(std::uint64_t nbytes);

  // Waits until everything written is on the device.
  void sync();

 private:
  void open_direct(int flags);

  const std::string path_;
  const bool writable_;
  Descriptor buffered_fd_;
  Descriptor direct_fd_;
  std::atomic<bool> direct_{false};
  std::size_t granule_ = 4096;
  std::size_t memory_align_ = 4096;

  mutable std::mutex reason_mutex_;
  std::string reason_;
};

}  // namespace zerosharder::io
