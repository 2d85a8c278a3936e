// SPDX-License-Identifier: Apache-2.0

#include "io/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace zerosharder::io {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // bits reflected

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// Row k holds the effect of a byte that is followed by k more.
Tables make_tables() noexcept {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (std::size_t row = 1; row < tables.size(); ++row) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[row - 1][byte];
      tables[row][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const unsigned char* at,
                                                               std::size_t nbytes) noexcept {
  std::uint64_t value = 0xffffffff;
  for (; nbytes >= 8; at += 8, nbytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, at, 8);
    value = _mm_crc32_u64(value, word);
  }
  auto low = static_cast<std::uint32_t>(value);
  for (; nbytes != 0; ++at, --nbytes) low = _mm_crc32_u8(low, *at);
  return ~low;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes) noexcept {
  static const Tables tables = make_tables();
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t value = 0xffffffff;
  for (; nbytes >= 8; at += 8, nbytes -= 8) {
    const std::uint32_t low = value ^ (at[0] | at[1] << 8 | at[2] << 16 | static_cast<std::uint32_t>(at[3]) << 24);
    value = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^
            tables[4][low >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
  }
  for (; nbytes != 0; ++at, --nbytes) value = (value >> 8) ^ tables[0][(value ^ *at) & 0xff];
  return ~value;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes) noexcept {
#if defined(__x86_64__)
  static const bool present = __builtin_cpu_supports("sse4.2") != 0;
  if (present) return by_instruction(static_cast<const unsigned char*>(data), nbytes);
#endif
  return crc32c_portable(data, nbytes);
}

}  // namespace zerosharder::io
