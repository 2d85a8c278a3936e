// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of a store lie: stripes of equal length dealt to folders in proportion to their shares.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zerosharder::io {

// A run of bytes within one stripe.
struct Extent {
  std::size_t folder = 0;
  std::uint64_t file_offset = 0;  // bytes, in the file of the folder
  std::uint64_t offset = 0;       // bytes, in the store
  std::size_t nbytes = 0;
};

class Striping {
 public:
  // Shares are relative and positive. Throws std::invalid_argument for anything no store can be made of.
  Striping(std::uint64_t nbytes, std::vector<double> shares, std::size_t stripe);

  std::uint64_t nbytes() const noexcept { return nbytes_; }
  std::size_t stripe() const noexcept { return stripe_; }
  std::size_t folders() const noexcept { return lengths_.size(); }

  // Bytes of the file in a folder.
  std::uint64_t length(std::size_t folder) const noexcept { return lengths_[folder]; }

  // The extents of [offset, offset + nbytes), which must lie inside, in ascending order.
  std::vector<Extent> extents(std::uint64_t offset, std::size_t nbytes) const;

 private:
  struct Place {
    std::uint32_t folder = 0;
    std::uint32_t index = 0;  // of the stripe in the folder's file
  };

  const std::uint64_t nbytes_;
  const std::size_t stripe_;
  std::vector<Place> places_;  // of every stripe
  std::vector<std::uint64_t> lengths_;
};

}  // namespace zerosharder::io
