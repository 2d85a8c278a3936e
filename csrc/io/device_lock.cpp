// SPDX-License-Identifier: Apache-2.0

#include "io/device_lock.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

namespace zerosharder::io {
namespace {

[[noreturn]] void fail(const char* call, const std::string& path) {
  throw std::system_error(errno, std::generic_category(), std::string(call) + " of " + path);
}

int set_lock(int fd, short type) noexcept {
  struct flock record{};
  record.l_type = type;
  record.l_whence = SEEK_SET;  // from 0 for 0 bytes: the whole file
  return ::fcntl(fd, F_SETLK, &record);
}

}  // namespace

std::shared_ptr<DeviceLock> DeviceLock::open(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::shared_ptr<DeviceLock>> opened;  // kept for good, see the header
  const std::lock_guard<std::mutex> lock(mutex);
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0) {
    const auto found = opened.find({status.st_dev, status.st_ino});
    if (found != opened.end()) return found->second;
  }
  Descriptor descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!descriptor) fail("open", path);
  if (::fstat(descriptor.get(), &status) != 0) fail("fstat", path);
  auto made = std::make_shared<DeviceLock>(std::move(descriptor), path);
  opened.emplace(std::make_pair(status.st_dev, status.st_ino), made);
  return made;
}

bool DeviceLock::try_lock() {
  if (held_.exchange(true, std::memory_order_acquire)) return false;
  if (set_lock(descriptor_.get(), F_WRLCK) == 0) return true;
  const int code = errno;
  held_.store(false, std::memory_order_release);
  if (code == EAGAIN || code == EACCES || code == EINTR) return false;
  errno = code;
  fail("lock", path_);
}

void DeviceLock::unlock() noexcept {
  set_lock(descriptor_.get(), F_UNLCK);
  held_.store(false, std::memory_order_release);
}

}  // namespace zerosharder::io
