// SPDX-License-Identifier: Apache-2.0

#include "io/faults.h"

#include <algorithm>
#include <cerrno>

namespace zerosharder::io {

Fault RandomFaults::next(Kind, std::uint64_t, std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uniform_real_distribution<double> chance(0.0, 1.0);
  Fault fault;
  fault.delay = options_.delay;
  if (pieces_++ >= options_.after && chance(random_) < options_.error) {
    fault.error = options_.error_code;
  } else if (chance(random_) < options_.again) {
    fault.error = chance(random_) < 0.5 ? EAGAIN : EINTR;
  } else if (chance(random_) < options_.cut) {
    std::uniform_int_distribution<std::size_t> length(1, std::max<std::size_t>(1, nbytes));
    fault.limit = length(random_);
  }
  return fault;
}

}  // namespace zerosharder::io
