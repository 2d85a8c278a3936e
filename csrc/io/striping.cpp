// SPDX-License-Identifier: Apache-2.0

#include "io/striping.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace zerosharder::io {

Striping::Striping(std::uint64_t nbytes, std::vector<double> shares, std::size_t stripe)
    : nbytes_(nbytes), stripe_(stripe), lengths_(shares.size(), 0) {
  if (shares.empty()) throw std::invalid_argument("a store needs at least one folder");
  for (const double share : shares) {
    if (!(share > 0) || !std::isfinite(share)) {
      throw std::invalid_argument("shares must be positive and finite, not " + std::to_string(share));
    }
  }
  if (stripe < 4096 || stripe % 4096 != 0) {
    throw std::invalid_argument("stripe must be a multiple of 4096 bytes, not " + std::to_string(stripe));
  }
  const std::uint64_t count = nbytes / stripe + (nbytes % stripe != 0);
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("too many stripes; make them longer than " + std::to_string(stripe) + " bytes");
  }
  places_.reserve(static_cast<std::size_t>(count));
  std::vector<std::uint32_t> dealt(shares.size(), 0);
  for (std::uint64_t i = 0; i < count; ++i) {
    // To whoever would finish it first if all had started at once: the split of any prefix follows the shares.
    std::size_t best = 0;
    for (std::size_t f = 1; f < shares.size(); ++f) {
      if ((dealt[f] + 1) / shares[f] < (dealt[best] + 1) / shares[best]) best = f;
    }
    places_.push_back({static_cast<std::uint32_t>(best), dealt[best]++});
    lengths_[best] += std::min<std::uint64_t>(stripe, nbytes - i * stripe);
  }
}

std::vector<Extent> Striping::extents(std::uint64_t offset, std::size_t nbytes) const {
  std::vector<Extent> found;
  while (nbytes != 0) {
    const Place& place = places_[static_cast<std::size_t>(offset / stripe_)];
    const auto past = static_cast<std::size_t>(offset % stripe_);
    const std::size_t length = std::min(nbytes, stripe_ - past);
    found.push_back({place.folder, std::uint64_t{place.index} * stripe_ + past, offset, length});
    offset += length;
    nbytes -= length;
  }
  return found;
}

}  // namespace zerosharder::io
