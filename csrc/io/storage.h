// SPDX-License-Identifier: Apache-2.0
//
// What a pipeline reads from and writes to: bytes at offsets, whether they lie in one file or are striped over
// several folders.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>

#include "io/transfer.h"

namespace zerosharder::io {

// Bytes [offset, offset + nbytes) of a storage. The memory must stay until the operation has finished().
struct Span {
  std::uint64_t offset = 0;
  unsigned char* data = nullptr;  // not written to by write()
  std::size_t nbytes = 0;
};

// One or more transfers under way that count as one. Any thread.
class Operation {
 public:
  virtual ~Operation() = default;

  // Whether the memory belongs to the caller again.
  virtual bool finished() const = 0;
  virtual bool wait_until(Clock::time_point deadline) const = 0;

  // What went wrong (an IoError, or a more special one); null if every byte made it. Only after finished().
  virtual std::exception_ptr error() const = 0;

  // Asks for an early end; the memory is in use until finished().
  virtual void cancel() = 0;
};

class Storage {
 public:
  virtual ~Storage() = default;

  // Throw std::system_error if the span lies outside or the engine is closed.
  virtual std::shared_ptr<Operation> read(const Span& span, std::int64_t unit) = 0;
  virtual std::shared_ptr<Operation> write(const Span& span, std::int64_t unit) = 0;

  virtual std::uint64_t size() const = 0;  // bytes
};

}  // namespace zerosharder::io
