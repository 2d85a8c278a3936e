// SPDX-License-Identifier: Apache-2.0
//
// A fixed number of bytes striped over folders, one file without a name in each. Whoever makes a store has the
// disk space: that a disk is full shows before anything is written. The space is free again when the store goes or
// its process ends, however it ends.
//
// With checksums, the CRC-32C of every range is kept as it was written, cut at stripes. A read verifies those
// ranges that lie inside it whole; a write forgets those that it touches.

#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/engine.h"
#include "io/file.h"
#include "io/storage.h"
#include "io/striping.h"

namespace zerosharder::io {

// Bytes that were read are not those that were written (EBADMSG).
class ChecksumError : public IoError {
 public:
  ChecksumError(const std::string& message, Where where, std::uint32_t written, std::uint32_t found)
      : IoError(EBADMSG, message, std::move(where)), written_(written), found_(found) {}

  std::uint32_t written() const noexcept { return written_; }  // CRC-32C
  std::uint32_t found() const noexcept { return found_; }

 private:
  std::uint32_t written_;
  std::uint32_t found_;
};

class BlockStore : public Storage {
 public:
  struct Options {
    std::uint64_t nbytes = 0;
    std::vector<std::string> folders;
    std::vector<double> shares;                 // of the bytes, one for each folder; empty: equal
    std::size_t stripe = std::size_t{4} << 20;  // bytes, a multiple of 4096
    bool direct = true;                         // O_DIRECT where the file systems have it
    bool checksums = false;
  };

  // Throws std::invalid_argument for options no store can be made of; IoError with the folder, the bytes needed
  // and those free if there is no space (ENOSPC, EDQUOT, EFBIG); std::system_error if no file can be made.
  BlockStore(std::shared_ptr<Engine> engine, Options options);

  // The memory must stay until the operation has finished(). A range that is being written may be read only after
  // the write has finished. Throw IoError (EINVAL) if the span lies outside, and what Engine::submit throws; no
  // part of the operation is in flight then.
  std::shared_ptr<Operation> read(const Span& span, std::int64_t unit) override;
  std::shared_ptr<Operation> write(const Span& span, std::int64_t unit) override;

  std::uint64_t size() const override { return striping_.nbytes(); }
  const Striping& striping() const noexcept { return striping_; }
  const File& file(std::size_t folder) const { return *files_.at(folder); }
  const std::shared_ptr<Engine>& engine() const noexcept { return engine_; }

  // A range as it was written.
  struct Written {
    std::uint64_t offset = 0;
    std::size_t nbytes = 0;
    std::uint32_t crc = 0;
  };

 private:
  std::shared_ptr<Operation> begin(Kind kind, const Span& span, std::int64_t unit);
  void make_files(const std::vector<std::string>& folders, bool direct);
  void remember(const Span& span, const std::vector<Extent>& extents);
  std::vector<Written> known_inside(const Span& span) const;

  const std::shared_ptr<Engine> engine_;
  const Striping striping_;
  const bool checksums_;
  std::vector<std::shared_ptr<File>> files_;  // of the folders

  struct Sum {
    std::size_t nbytes = 0;
    std::uint32_t crc = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Sum> written_;  // by offset; disjoint
};

}  // namespace zerosharder::io
