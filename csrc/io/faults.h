// SPDX-License-Identifier: Apache-2.0
//
// The seam through which tests disturb an engine: it is asked before every piece what shall go wrong with it.
// Without a source of faults it costs one comparison with null for each piece.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <random>

#include "io/transfer.h"

namespace zerosharder::io {

struct Fault {
  int error = 0;  // the piece is not carried out and this errno is its result
  std::size_t limit = std::numeric_limits<std::size_t>::max();  // at most so many bytes count as moved
  std::chrono::nanoseconds delay{0};                            // before the piece is begun
};

class FaultSource {
 public:
  virtual ~FaultSource() = default;

  // Called by any thread of an engine.
  virtual Fault next(Kind kind, std::uint64_t offset, std::size_t nbytes) = 0;
};

// Faults drawn from a seeded generator.
class RandomFaults : public FaultSource {
 public:
  struct Options {
    std::uint64_t seed = 0;
    double again = 0;                   // probability of EAGAIN or EINTR
    double cut = 0;                     // probability of a short transfer of 1 byte or more
    double error = 0;                   // probability of `error_code`
    int error_code = 5;                 // EIO
    std::uint64_t after = 0;            // pieces that go well before `error` is drawn at all
    std::chrono::nanoseconds delay{0};  // before every piece
  };

  explicit RandomFaults(Options options) : options_(options), random_(options.seed) {}

  Fault next(Kind kind, std::uint64_t offset, std::size_t nbytes) override;

 private:
  const Options options_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  std::uint64_t pieces_ = 0;
};

}  // namespace zerosharder::io
