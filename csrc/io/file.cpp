// SPDX-License-Identifier: Apache-2.0

#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "memory/buffer.h"

namespace zerosharder::io {
namespace {

constexpr long kTmpfsMagic = 0x01021994;
constexpr long kRamfsMagic = 0x858458f6;

[[noreturn]] void fail(int error, const char* call, const std::string& path) {
  throw std::system_error(error, std::generic_category(), std::string(call) + " of " + path);
}

int open_retrying(const char* path, int flags, mode_t mode) noexcept {
  int fd = -1;
  do {
    fd = ::open(path, flags, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// A file that no name leads to, so that the kernel frees its space when the process ends, however it ends.
Descriptor open_unnamed(const std::string& folder) {
#ifdef O_TMPFILE
  // O_EXCL: nobody can give it a name later.
  Descriptor file(open_retrying(folder.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (file) return file;
  // EISDIR: kernels that do not know the flag; EOPNOTSUPP: file systems; EINVAL: some layered ones.
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) fail(errno, "making an unnamed file", folder);
#endif
  // Inside a folder of our own, so that nobody can put another file in the way or open this one meanwhile.
  std::string made = folder + "/zerosharder-XXXXXX";
  if (::mkdtemp(made.data()) == nullptr) fail(errno, "mkdtemp", made);
  const std::string path = made + "/data";
  Descriptor named(open_retrying(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  int error = named ? 0 : errno;
  if (named && ::unlink(path.c_str()) != 0) error = errno;
  if (::rmdir(made.c_str()) != 0 && error == 0) error = errno;
  if (error != 0) fail(error, "making a file without a name", path);
  return named;
}

bool power_of_two(std::size_t value) noexcept { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

void Descriptor::reset(int fd) noexcept {
  // Not retried: Linux frees the number whatever close says, and another thread may own it by then.
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

File::File(std::string path, Options options) : path_(std::move(path)), writable_(options.write) {
  const int flags = (options.write ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  const int making = (options.create ? O_CREAT : 0) | (options.truncate ? O_TRUNC : 0);
  if (options.unnamed) {
    if (!options.write) throw std::invalid_argument("a file without a name has to be open for writing");
    buffered_fd_ = open_unnamed(path_);
  } else {
    buffered_fd_ = Descriptor(open_retrying(path_.c_str(), flags | making, 0600));
    if (!buffered_fd_) fail(errno, "open", path_);
  }
  struct stat status{};
  if (::fstat(buffered_fd_.get(), &status) != 0) fail(errno, "fstat", path_);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    fail(S_ISDIR(status.st_mode) ? EISDIR : ESPIPE, "positioned I/O", path_);
  }
  if (options.direct) {
    open_direct(flags);
  } else {
    reason_ = "not asked for";
  }
}

void File::open_direct(int flags) {
#ifdef O_DIRECT
  struct statfs fs{};
  if (::fstatfs(buffered_fd_.get(), &fs) == 0 && (fs.f_type == kTmpfsMagic || fs.f_type == kRamfsMagic)) {
    // Newer kernels accept O_DIRECT there and go through the page cache all the same.
    reason_ = "the file lies in memory (tmpfs)";
    return;
  }
  std::size_t offset_align = 4096;  // right for every block size in use
  std::size_t memory_align = 4096;
#ifdef STATX_DIOALIGN
  struct statx extra{};
  if (::statx(buffered_fd_.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &extra) == 0 &&
      (extra.stx_mask & STATX_DIOALIGN) != 0) {
    if (extra.stx_dio_offset_align == 0 || extra.stx_dio_mem_align == 0) {
      reason_ = "the file system has no O_DIRECT for this file";
      return;
    }
    offset_align = extra.stx_dio_offset_align;
    memory_align = extra.stx_dio_mem_align;
  }
#endif
  if (!power_of_two(offset_align) || !power_of_two(memory_align)) {
    reason_ = "the file system asks for an alignment that is no power of two";
    return;
  }
  // Through /proc it is the same file for sure, whatever happened to the path since, and also if it has none.
  const std::string self = "/proc/self/fd/" + std::to_string(buffered_fd_.get());
  int fd = open_retrying(self.c_str(), flags | O_DIRECT, 0);
  if (fd < 0 && errno == ENOENT) fd = open_retrying(path_.c_str(), flags | O_DIRECT, 0);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) fail(errno, "open with O_DIRECT", path_);
    reason_ = std::string("open with O_DIRECT: ") + std::strerror(errno);
    return;
  }
  direct_fd_ = Descriptor(fd);
  struct stat one{}, other{};
  if (::fstat(fd, &one) != 0 || ::fstat(buffered_fd_.get(), &other) != 0 || one.st_dev != other.st_dev ||
      one.st_ino != other.st_ino) {
    reason_ = "the path was replaced while it was being opened";
    return;
  }
  // Whole pages, too, so that a page of the cache is never shared by a direct and a buffered piece.
  granule_ = std::max(offset_align, page_size());
  memory_align_ = memory_align;
  direct_.store(true, std::memory_order_release);
#else
  reason_ = "this platform has no O_DIRECT";
#endif
}

std::string File::why_not_direct() const {
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  return reason_;
}

void File::stop_direct(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  if (!direct_.exchange(false, std::memory_order_acq_rel)) return;
  reason_ = why;
}

Piece File::next_piece(std::uint64_t offset, std::size_t left, const void* data) const noexcept {
  if (!direct()) return {Route::kBuffered, left};
  const std::size_t past = static_cast<std::size_t>(offset & (granule_ - 1));
  if (past != 0) return {Route::kBuffered, std::min(left, granule_ - past)};
  const std::size_t whole = left & ~(granule_ - 1);
  if (whole == 0) return {Route::kBuffered, left};
  const bool aligned = (reinterpret_cast<std::uintptr_t>(data) & (memory_align_ - 1)) == 0;
  return {aligned ? Route::kDirect : Route::kBounce, whole};
}

std::uint64_t File::size() const {
  struct stat status{};
  if (::fstat(buffered_fd_.get(), &status) != 0) fail(errno, "fstat", path_);
  if (S_ISBLK(status.st_mode)) {
    const off_t end = ::lseek(buffered_fd_.get(), 0, SEEK_END);
    if (end < 0) fail(errno, "lseek", path_);
    return static_cast<std::uint64_t>(end);
  }
  return static_cast<std::uint64_t>(status.st_size);
}

bool File::reserve(std::uint64_t nbytes) {
  if (nbytes == 0) return true;
  int result = 0;
  do {
    // Not posix_fallocate: where the file system cannot reserve, that one writes a byte to every block.
    result = ::fallocate(buffered_fd_.get(), 0, 0, static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  if (errno != EOPNOTSUPP && errno != ENOSYS) fail(errno, "reserving space for the first bytes", path_);
  if (size() < nbytes && ::ftruncate(buffered_fd_.get(), static_cast<off_t>(nbytes)) != 0) {
    fail(errno, "ftruncate", path_);
  }
  return false;
}

void File::sync() {
  // One descriptor is enough: dirty pages and the device's cache belong to the file.
  int result = 0;
  do {
    result = ::fdatasync(buffered_fd_.get());
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail(errno, "fdatasync", path_);
}

}  // namespace zerosharder::io
