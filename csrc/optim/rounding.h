// SPDX-License-Identifier: Apache-2.0
//
// Round to nearest, subnormals kept, while a kernel runs. The caller's thread may flush subnormals
// (torch.set_flush_denormal) while the pool's threads do not: results would depend on who took which chunk.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zerosharder::optim {
namespace {

class ScopedDefaultRounding {
 public:
  ScopedDefaultRounding(const ScopedDefaultRounding&) = delete;
  ScopedDefaultRounding& operator=(const ScopedDefaultRounding&) = delete;
#if defined(__x86_64__)
  ScopedDefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  ~ScopedDefaultRounding() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedDefaultRounding() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~ScopedDefaultRounding() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#else
  ScopedDefaultRounding() {}
  ~ScopedDefaultRounding() {}
#endif
};

}  // namespace
}  // namespace zerosharder::optim
