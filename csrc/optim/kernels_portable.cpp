// SPDX-License-Identifier: Apache-2.0
//
// The reference: one float at a time, for any CPU. std::fma is the C library's where the CPU has none, slow and
// exact.

#include <cfloat>
#include <cmath>
#include <cstring>

#include "optim/half.h"
#include "optim/kernels.h"
#include "optim/rounding.h"

namespace zerosharder::optim {
namespace {

struct V {
  using reg = float;
  using half = std::uint16_t;
  using DefaultRounding = ScopedDefaultRounding;
  static constexpr std::size_t kWidth = 1;

  static reg set(float x) { return x; }
  static reg load(const float* from) { return *from; }
  static reg load_bf16(const std::uint16_t* from) { return float_of_bf16(*from); }
  static reg load_fp16(const std::uint16_t* from) { return float_of_fp16(*from); }
  static void store(float* to, reg x) { *to = x; }
  static void stream(float* to, reg x) { *to = x; }
  static half to_bf16(reg x) { return bf16_of_float(x); }
  static half to_fp16(reg x) { return fp16_of_float(x); }
  static void store_half(std::uint16_t* to, half x) { *to = x; }
  static void stream_half(std::uint16_t* to, half x) { *to = x; }
  static void fence() {}

  static reg add(reg a, reg b) { return a + b; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg mul(reg a, reg b) { return a * b; }
  static reg div(reg a, reg b) { return a / b; }
  static reg sqrt(reg a) { return std::sqrt(a); }
  static reg fma(reg a, reg b, reg c) { return __builtin_fmaf(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return __builtin_fmaf(-a, b, c); }
  static reg min_or_bound(reg a, reg bound) { return a < bound ? a : bound; }
  static reg max_or_nan(reg a, reg b) { return b > a || b != b ? b : a; }
  static reg sign(reg a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
};

#include "optim/kernels_inl.h"

}  // namespace

const Kernels* portable_kernels() noexcept {
  static constexpr Kernels kernels = {"portable", step, squared_norm, nonfinite, bandwidth};
  return &kernels;
}

}  // namespace zerosharder::optim
