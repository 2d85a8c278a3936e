// SPDX-License-Identifier: Apache-2.0
//
// Optimizer arithmetic over flat ranges of host memory, compiled once per instruction set.
//
// Contract of every variant: the same bits as the portable one (NaN payloads aside). It rests on three rules: an
// fma happens exactly where the source says so (-ffp-contract=off, also for intrinsics, which gcc would contract),
// every other operation is correctly rounded, and tails run through the same vector code on a padded copy.

#pragma once

#include <cstddef>
#include <cstdint>

namespace zerosharder::optim {

// Elements per task. A whole number of pages for 2- and 4-byte types, so that the split of a range, and with it
// every result, is a function of its length alone.
inline constexpr std::size_t kChunk = std::size_t{1} << 16;

enum class Rule { adam, adam_amsgrad, sgd, sgd_momentum, lion, adagrad };
enum class DType { f32, bf16, f16, none };

// Bits of StepArgs::stream: which stores bypass the caches. They need 64-byte aligned pointers.
inline constexpr int kStreamState = 1;
inline constexpr int kStreamOut = 2;

// Square roots of n floats, in place. torch's plain steps take them from the vector library it is linked with,
// whose roots are not always the nearest float; to agree with them bit for bit is to call the same function.
using Roots = void (*)(int n, const float* from, float* to, long long mode);

// One step over n elements. The pointers of unused state and of an absent copy are null.
struct StepArgs {
  Rule rule = Rule::adam;
  float* weight = nullptr;
  const void* grad = nullptr;
  float* state[3] = {nullptr, nullptr, nullptr};
  std::uint16_t* copy = nullptr;  // new weights, rounded to nearest even
  DType grad_type = DType::f32;
  DType copy_type = DType::none;
  int stream = 0;

  float grad_scale = 1;  // negative: maximize
  float l2 = 0;          // weight decay added to the gradient
  float decay = 1;       // factor on the weight (decoupled weight decay)
  float step = 0;        // -(step size)
  float lerp = 0;        // weight of the new gradient in the first moment, or of it minus one, see lerp_from_grad
  bool lerp_from_grad = false;
  float beta1 = 0;        // also: momentum
  float grad_share1 = 0;  // factor of the gradient beside beta1: 1 - beta1 or 1 - dampening
  float beta2 = 0;
  float grad_share2 = 0;
  float root_scale = 1;  // square root of the second bias correction
  float eps = 0;
  bool nesterov = false;
  bool first = false;  // momentum buffers start as the gradient

  Roots roots = nullptr;  // for the rules of Adam; null: the CPU's own, which are correctly rounded
  long long roots_mode = 0;
};

// The functions work on elements [begin, end) and never throw or allocate.
struct Kernels {
  const char* name;
  void (*step)(const StepArgs& args, std::size_t begin, std::size_t end);
  // Sum of squares in double: element i belongs to lane i mod 16, lanes are added as a fixed tree.
  double (*squared_norm)(const void* data, DType type, std::size_t begin, std::size_t end);
  bool (*nonfinite)(const void* data, DType type, std::size_t begin, std::size_t end);
  // Streams of an AdamW step with almost no arithmetic: what memory alone would allow.
  void (*bandwidth)(const StepArgs& args, std::size_t begin, std::size_t end);
};

// Null where this build has no such variant. Whether the CPU can run it is the business of dispatch.h.
const Kernels* portable_kernels() noexcept;
const Kernels* avx2_kernels() noexcept;
const Kernels* avx512_kernels() noexcept;
const Kernels* neon_kernels() noexcept;

}  // namespace zerosharder::optim
