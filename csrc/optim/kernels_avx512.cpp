// SPDX-License-Identifier: Apache-2.0

#include <cfloat>
#include <cstring>

#include "optim/kernels.h"
#include "optim/rounding.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "optim/target.h"

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 warns of the deliberately undefined operands in its own header (PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

ZS_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

namespace zerosharder::optim {
namespace {

struct V {
  using reg = __m512;
  using half = __m256i;
  using DefaultRounding = ScopedDefaultRounding;
  static constexpr std::size_t kWidth = 16;

  static reg set(float x) { return _mm512_set1_ps(x); }
  static reg load(const float* from) { return _mm512_loadu_ps(from); }
  static half load_half(const std::uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static reg load_bf16(const std::uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(from)), 16));
  }
  static reg load_fp16(const std::uint16_t* from) { return _mm512_cvtph_ps(load_half(from)); }
  static void store(float* to, reg x) { _mm512_storeu_ps(to, x); }
  static void stream(float* to, reg x) { _mm512_stream_ps(to, x); }
  static half to_bf16(reg x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet));
  }
  static half to_fp16(reg x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static void store_half(std::uint16_t* to, half x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
  static void stream_half(std::uint16_t* to, half x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x); }
  static void fence() { _mm_sfence(); }

  static reg add(reg a, reg b) { return _mm512_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm512_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm512_div_ps(a, b); }
  static reg sqrt(reg a) { return _mm512_sqrt_ps(a); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return _mm512_fnmadd_ps(a, b, c); }
  // NaN in a gives the bound.
  static reg min_or_bound(reg a, reg bound) { return _mm512_min_ps(a, bound); }
  static reg max_or_nan(reg a, reg b) {
    const __mmask16 greater = _mm512_cmp_ps_mask(b, a, _CMP_GT_OQ);
    return _mm512_mask_blend_ps(greater | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q), a, b);
  }
  static reg sign(reg a) {
    const reg zero = _mm512_setzero_ps();
    const reg positive = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), a, set(1.0f));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), positive, set(-1.0f));
  }
};

#include "optim/kernels_inl.h"

}  // namespace

const Kernels* avx512_kernels() noexcept {
  static constexpr Kernels kernels = {"avx512", step, squared_norm, nonfinite, bandwidth};
  return &kernels;
}

}  // namespace zerosharder::optim

ZS_TARGET_END

#else

namespace zerosharder::optim {
const Kernels* avx512_kernels() noexcept { return nullptr; }
}  // namespace zerosharder::optim

#endif
