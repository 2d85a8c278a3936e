// SPDX-License-Identifier: Apache-2.0

#include <cfloat>
#include <cstring>

#include "optim/kernels.h"
#include "optim/rounding.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "optim/target.h"

ZS_TARGET("avx2,fma,f16c")

namespace zerosharder::optim {
namespace {

struct V {
  using reg = __m256;
  using half = __m128i;
  using DefaultRounding = ScopedDefaultRounding;
  static constexpr std::size_t kWidth = 8;

  static reg set(float x) { return _mm256_set1_ps(x); }
  static reg load(const float* from) { return _mm256_loadu_ps(from); }
  static half load_half(const std::uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static reg load_bf16(const std::uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
  }
  static reg load_fp16(const std::uint16_t* from) { return _mm256_cvtph_ps(load_half(from)); }
  static void store(float* to, reg x) { _mm256_storeu_ps(to, x); }
  static void stream(float* to, reg x) { _mm256_stream_ps(to, x); }
  static half to_bf16(reg x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  static half to_fp16(reg x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static void store_half(std::uint16_t* to, half x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
  static void stream_half(std::uint16_t* to, half x) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), x); }
  static void fence() { _mm_sfence(); }

  static reg add(reg a, reg b) { return _mm256_add_ps(a, b); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg mul(reg a, reg b) { return _mm256_mul_ps(a, b); }
  static reg div(reg a, reg b) { return _mm256_div_ps(a, b); }
  static reg sqrt(reg a) { return _mm256_sqrt_ps(a); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static reg fnma(reg a, reg b, reg c) { return _mm256_fnmadd_ps(a, b, c); }
  // NaN in a gives the bound.
  static reg min_or_bound(reg a, reg bound) { return _mm256_min_ps(a, bound); }
  static reg max_or_nan(reg a, reg b) {
    const reg greater = _mm256_cmp_ps(b, a, _CMP_GT_OQ);
    return _mm256_blendv_ps(a, b, _mm256_or_ps(greater, _mm256_cmp_ps(b, b, _CMP_UNORD_Q)));
  }
  static reg sign(reg a) {
    const reg zero = _mm256_setzero_ps();
    const reg positive = _mm256_blendv_ps(a, set(1.0f), _mm256_cmp_ps(a, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(positive, set(-1.0f), _mm256_cmp_ps(a, zero, _CMP_LT_OQ));
  }
};

#include "optim/kernels_inl.h"

}  // namespace

const Kernels* avx2_kernels() noexcept {
  static constexpr Kernels kernels = {"avx2", step, squared_norm, nonfinite, bandwidth};
  return &kernels;
}

}  // namespace zerosharder::optim

ZS_TARGET_END

#else

namespace zerosharder::optim {
const Kernels* avx2_kernels() noexcept { return nullptr; }
}  // namespace zerosharder::optim

#endif
