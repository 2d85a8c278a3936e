// SPDX-License-Identifier: Apache-2.0
//
// A lock between the processes of a host, by which they take turns on a device.
//
// It is a record lock of POSIX on a small file. The kernel drops it when its process dies, however it dies. Unlike
// locks that belong to an open file, it does not pass to children of a fork, so that a data loader's worker that
// outlives its parent holds nobody up. Record locks know only processes: threads of one exclude each other by a
// flag, and all of them share one descriptor, because closing any descriptor of the file would drop the lock.

#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "io/file.h"

namespace zerosharder::io {

class DeviceLock {
 public:
  // The lock of this path, made with mode 0600 if it is not there; one object in a process for each file. Throws
  // std::system_error with the path.
  static std::shared_ptr<DeviceLock> open(const std::string& path);

  explicit DeviceLock(Descriptor descriptor, std::string path)
      : descriptor_(std::move(descriptor)), path_(std::move(path)) {}

  DeviceLock(const DeviceLock&) = delete;
  DeviceLock& operator=(const DeviceLock&) = delete;

  // Whether the caller holds it now. Throws std::system_error if the file system has no locks.
  bool try_lock();
  void unlock() noexcept;

 private:
  const Descriptor descriptor_;
  const std::string path_;
  std::atomic<bool> held_{false};  // by a thread of this process
};

}  // namespace zerosharder::io
