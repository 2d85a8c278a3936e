// SPDX-License-Identifier: Apache-2.0
//
// AArch64 has NEON, fma and fp16 conversion in its base, so no flags and no check at run time.

#include <cfloat>
#include <cstring>

#include "optim/kernels.h"
#include "optim/rounding.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace zerosharder::optim {
namespace {

struct V {
  using reg = float32x4_t;
  using half = uint16x4_t;
  using DefaultRounding = ScopedDefaultRounding;
  static constexpr std::size_t kWidth = 4;

  static reg set(float x) { return vdupq_n_f32(x); }
  static reg load(const float* from) { return vld1q_f32(from); }
  static reg load_bf16(const std::uint16_t* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
  }
  static reg load_fp16(const std::uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
  static void store(float* to, reg x) { vst1q_f32(to, x); }
  static void stream(float* to, reg x) { vst1q_f32(to, x); }
  static half to_bf16(reg x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t upper = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    const uint32x4_t number = vceqq_f32(x, x);
    return vmovn_u32(vbslq_u32(number, rounded, vorrq_u32(upper, vdupq_n_u32(0x40))));
  }
  static half to_fp16(reg x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
  static void store_half(std::uint16_t* to, half x) { vst1_u16(to, x); }
  static void stream_half(std::uint16_t* to, half x) { vst1_u16(to, x); }
  static void fence() {}

  static reg add(reg a, reg b) { return vaddq_f32(a, b); }
  static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
  static reg mul(reg a, reg b) { return vmulq_f32(a, b); }
  static reg div(reg a, reg b) { return vdivq_f32(a, b); }
  static reg sqrt(reg a) { return vsqrtq_f32(a); }
  static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
  static reg fnma(reg a, reg b, reg c) { return vfmsq_f32(c, a, b); }
  // NaN in a gives the bound.
  static reg min_or_bound(reg a, reg bound) { return vminnmq_f32(a, bound); }
  static reg max_or_nan(reg a, reg b) {
    const uint32x4_t number = vceqq_f32(b, b);
    return vbslq_f32(vorrq_u32(vcgtq_f32(b, a), vmvnq_u32(number)), b, a);
  }
  static reg sign(reg a) {
    const reg zero = vdupq_n_f32(0.0f);
    return vbslq_f32(vcltq_f32(a, zero), set(-1.0f), vbslq_f32(vcgtq_f32(a, zero), set(1.0f), a));
  }
};

#include "optim/kernels_inl.h"

}  // namespace

const Kernels* neon_kernels() noexcept {
  static constexpr Kernels kernels = {"neon", step, squared_norm, nonfinite, bandwidth};
  return &kernels;
}

}  // namespace zerosharder::optim

#else

namespace zerosharder::optim {
const Kernels* neon_kernels() noexcept { return nullptr; }
}  // namespace zerosharder::optim

#endif
