// SPDX-License-Identifier: Apache-2.0
//
// Conversions between float and the 16-bit types on their bits. Exact, subnormals included; NaNs stay NaN, quiet,
// with the upper bits of their payload, as F16C does it. Every function is static: a copy compiled for one
// instruction set must not be linked in place of another's.

#pragma once

#include <cstdint>
#include <cstring>

namespace zerosharder::optim {

static inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of_bf16(std::uint16_t half) { return float_of_bits(std::uint32_t{half} << 16); }

static inline std::uint16_t bf16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float_of_fp16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const std::uint32_t exponent = (half >> 10) & 31u;
  const std::uint32_t fraction = half & 0x3ffu;
  if (exponent == 31u) {
    return float_of_bits(sign | 0x7f800000u | (fraction << 13) | (fraction != 0 ? 0x400000u : 0u));
  }
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return float_of_bits(sign | bits_of_float(magnitude));
  }
  return float_of_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

static inline std::uint16_t fp16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 2^16 and above
  std::uint32_t result;
  if (magnitude >= 0x38800000u) {  // normal in fp16; a carry out of the fraction may reach infinity, as it should
    result = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  } else {
    // Subnormal: the significand moves right until its last bit means 2^-24.
    const std::uint32_t exponent = magnitude >> 23;
    if (exponent < 102u) return static_cast<std::uint16_t>(sign);  // below 2^-25: zero
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t shift = 126u - exponent;  // 14 to 24
    const std::uint32_t kept = significand >> shift;
    const std::uint32_t rest = significand & ((1u << shift) - 1u);
    const std::uint32_t halfway = 1u << (shift - 1u);
    result = kept + ((rest > halfway || (rest == halfway && (kept & 1u))) ? 1u : 0u);
  }
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace zerosharder::optim
