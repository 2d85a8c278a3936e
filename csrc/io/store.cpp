// SPDX-License-Identifier: Apache-2.0

#include "io/store.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "io/crc32c.h"

namespace zerosharder::io {
namespace {

struct Run {
  std::shared_ptr<Transfer> transfer;
  std::uint64_t offset = 0;  // in the store
};

std::string hex(std::uint32_t crc) {
  char text[11];
  std::snprintf(text, sizeof text, "0x%08" PRIx32, crc);
  return text;
}

class StoreOperation : public Operation {
 public:
  StoreOperation(std::shared_ptr<Engine> engine, Kind kind, const Span& span, std::size_t runs)
      : engine_(std::move(engine)), kind_(kind), span_(span) {
    runs_.reserve(runs);
  }

  void add(Run run) { runs_.push_back(std::move(run)); }
  void verify(std::vector<BlockStore::Written> expected) { expected_ = std::move(expected); }

  bool finished() const override {
    for (const Run& run : runs_) {
      if (!run.transfer->finished()) return false;
    }
    settle();
    return true;
  }

  bool wait_until(Clock::time_point deadline) const override {
    for (const Run& run : runs_) {
      if (!run.transfer->wait_until(deadline)) return false;
    }
    settle();
    return true;
  }

  std::exception_ptr error() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  void cancel() override {
    for (const Run& run : runs_) engine_->cancel(run.transfer);
  }

 private:
  // Whoever sees the end first looks at the bytes, before anybody is told that the memory is free.
  void settle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (settled_) return;
    settled_ = true;
    error_ = transfer_error();
    if (error_ == nullptr) error_ = checksum_error();
  }

  std::exception_ptr transfer_error() const {
    std::size_t done = 0;
    for (const Run& run : runs_) done += run.transfer->done_bytes();
    for (const Run& run : runs_) {
      const auto error = run.transfer->error();
      if (error == nullptr) continue;
      IoError::Where where = error->where();
      where.offset = run.offset + (where.offset - run.transfer->request().offset);
      where.expected = span_.nbytes;
      where.done = done;
      return std::make_exception_ptr(
          IoError(error->code().value(),
                  (kind_ == Kind::kRead ? "read" : "write") + std::string(" of the store at offset ") +
                      std::to_string(where.offset) + "; in the file: " + error->message(),
                  where));
    }
    return nullptr;
  }

  std::exception_ptr checksum_error() const {
    for (const BlockStore::Written& range : expected_) {
      const std::uint32_t found = crc32c(span_.data + (range.offset - span_.offset), range.nbytes);
      if (found == range.crc) continue;
      std::string path;
      for (const Run& run : runs_) {
        if (run.offset <= range.offset) path = run.transfer->request().file->path();
      }
      return std::make_exception_ptr(ChecksumError(
          "the " + std::to_string(range.nbytes) + " bytes at offset " + std::to_string(range.offset) +
              " of the store are not those that were written: checksum " + hex(found) + " instead of " +
              hex(range.crc),
          {path, range.offset, range.nbytes, range.nbytes}, range.crc, found));
    }
    return nullptr;
  }

  const std::shared_ptr<Engine> engine_;
  const Kind kind_;
  const Span span_;
  std::vector<Run> runs_;  // ascending
  std::vector<BlockStore::Written> expected_;

  mutable std::mutex mutex_;
  mutable bool settled_ = false;
  mutable std::exception_ptr error_;
};

std::vector<double> equal_unless_given(const BlockStore::Options& options) {
  if (options.shares.empty()) return std::vector<double>(options.folders.size(), 1.0);
  if (options.shares.size() != options.folders.size()) {
    throw std::invalid_argument(std::to_string(options.shares.size()) + " shares for " +
                                std::to_string(options.folders.size()) + " folders");
  }
  return options.shares;
}

// Neighbours in the store that are neighbours in a file, too, become one.
std::vector<Extent> merged(const std::vector<Extent>& extents) {
  std::vector<Extent> runs;
  for (const Extent& extent : extents) {
    if (!runs.empty() && runs.back().folder == extent.folder &&
        runs.back().file_offset + runs.back().nbytes == extent.file_offset) {
      runs.back().nbytes += extent.nbytes;
    } else {
      runs.push_back(extent);
    }
  }
  return runs;
}

}  // namespace

BlockStore::BlockStore(std::shared_ptr<Engine> engine, Options options)
    : engine_(std::move(engine)),
      striping_(options.nbytes, equal_unless_given(options), options.stripe),
      checksums_(options.checksums) {
  if (engine_ == nullptr) throw std::invalid_argument("a store needs an engine");
  make_files(options.folders, options.direct);
}

void BlockStore::make_files(const std::vector<std::string>& folders, bool direct) {
  File::Options how;
  how.write = how.unnamed = true;
  how.direct = direct;
  for (const std::string& folder : folders) files_.push_back(std::make_shared<File>(folder, how));

  std::map<dev_t, std::uint64_t> promised;  // bytes that no reservation stands behind
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const std::uint64_t needed = striping_.length(i);
    const int fd = files_[i]->fd(Route::kBuffered);
    struct statvfs space{};
    struct stat status{};
    if (::fstatvfs(fd, &space) != 0 || ::fstat(fd, &status) != 0) {
      throw std::system_error(errno, std::generic_category(), "looking for free space in " + folders[i]);
    }
    const std::uint64_t free =
        std::uint64_t{space.f_bavail} * space.f_frsize;  // before a failed attempt takes some
    int error = 0;
    std::uint64_t before = 0;
    try {
      if (!files_[i]->reserve(needed)) {
        before = promised[status.st_dev];
        promised[status.st_dev] += needed;
        if (needed > free || before > free - needed) error = ENOSPC;
      }
    } catch (const std::system_error& failed) {
      error = failed.code().value();
    }
    if (error == 0) continue;
    std::string text = "a store needs " + std::to_string(needed) + " bytes in " + folders[i] + ", where " +
                       std::to_string(free) + " are free";
    if (before != 0) text += " and " + std::to_string(before) + " of them taken by its other folders";
    throw IoError(error, text, {folders[i], 0, static_cast<std::size_t>(needed), 0});
  }
}

std::shared_ptr<Operation> BlockStore::read(const Span& span, std::int64_t unit) {
  return begin(Kind::kRead, span, unit);
}

std::shared_ptr<Operation> BlockStore::write(const Span& span, std::int64_t unit) {
  return begin(Kind::kWrite, span, unit);
}

std::shared_ptr<Operation> BlockStore::begin(Kind kind, const Span& span, std::int64_t unit) {
  if (span.offset > size() || span.nbytes > size() - span.offset) {
    throw IoError(EINVAL,
                  std::to_string(span.nbytes) + " bytes at offset " + std::to_string(span.offset) +
                      " lie outside the store of " + std::to_string(size()) + " bytes",
                  {files_.front()->path(), span.offset, span.nbytes, 0});
  }
  const std::vector<Extent> extents = striping_.extents(span.offset, span.nbytes);
  const std::vector<Extent> runs = merged(extents);
  const auto operation = std::make_shared<StoreOperation>(engine_, kind, span, runs.size());
  if (checksums_ && kind == Kind::kRead) operation->verify(known_inside(span));
  if (checksums_ && kind == Kind::kWrite) remember(span, extents);
  try {
    for (const Extent& run : runs) {
      Request request;
      request.file = files_[run.folder];
      request.kind = kind;
      request.offset = run.file_offset;
      request.data = span.data + (run.offset - span.offset);
      request.nbytes = run.nbytes;
      request.unit = unit;
      operation->add({engine_->submit(std::move(request)), run.offset});
    }
  } catch (...) {
    // The caller will take its memory back: the kernel must have let go of it by then.
    operation->cancel();
    operation->wait_until(Clock::time_point::max());
    throw;
  }
  return operation;
}

// Before the write begins. Should it fail, a later read says that the bytes are not those that were meant.
void BlockStore::remember(const Span& span, const std::vector<Extent>& extents) {
  if (span.nbytes == 0) return;
  std::map<std::uint64_t, Sum> sums;
  for (const Extent& extent : extents) {
    sums[extent.offset] = {extent.nbytes, crc32c(span.data + (extent.offset - span.offset), extent.nbytes)};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto at = written_.lower_bound(span.offset);
  if (at != written_.begin()) {
    const auto previous = std::prev(at);
    if (previous->first + previous->second.nbytes > span.offset) at = previous;
  }
  while (at != written_.end() && at->first < span.offset + span.nbytes) at = written_.erase(at);
  written_.merge(sums);
}

std::vector<BlockStore::Written> BlockStore::known_inside(const Span& span) const {
  const std::uint64_t end = span.offset + span.nbytes;
  std::vector<Written> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = written_.lower_bound(span.offset); at != written_.end() && at->first < end; ++at) {
    if (at->first + at->second.nbytes <= end) found.push_back({at->first, at->second.nbytes, at->second.crc});
  }
  return found;
}

}  // namespace zerosharder::io
