// SPDX-License-Identifier: Apache-2.0
//
// Every rule, type and odd length on every usable variant, for sanitizers: exact heap blocks, so that a read or
// write past an end is seen; two callers share a pool, so that races are. Prints nothing and returns 0 when all
// agree.
//
//   g++ -std=c++17 -O1 -g -ffp-contract=off -fsanitize=address,undefined -Icsrc tests/native/optim_driver.cpp
//       csrc/optim/pool.cpp csrc/optim/dispatch.cpp csrc/optim/kernels_*.cpp -pthread

#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "optim/dispatch.h"

namespace {

using namespace zerosharder::optim;

struct Outcome {
  std::vector<float> weight, state;
  std::vector<std::uint16_t> copy;
  double norm = 0;
};

Outcome run(ThreadPool& pool, const Kernels& kernels, Rule rule, DType grad, std::size_t n) {
  Outcome result{std::vector<float>(n, 0.5f), std::vector<float>(3 * n, 0.25f), std::vector<std::uint16_t>(n), 0};
  std::vector<std::uint16_t> halves(n, 0x3c12);
  std::vector<float> wide(n, -0.375f);
  StepArgs a;
  a.rule = rule;
  a.weight = result.weight.data();
  a.grad = grad == DType::f32 ? static_cast<const void*>(wide.data()) : halves.data();
  a.grad_type = grad;
  for (std::size_t k = 0; k < 3; ++k) a.state[k] = result.state.data() + k * n;
  a.copy = result.copy.data();
  a.copy_type = grad == DType::f16 ? DType::f16 : DType::bf16;
  a.stream = kStreamState | kStreamOut;
  a.step = -0.01f;
  a.lerp = 0.1f;
  a.beta1 = 0.9f;
  a.grad_share1 = 0.1f;
  a.beta2 = 0.99f;
  a.grad_share2 = 0.01f;
  a.root_scale = 0.3f;
  a.eps = 1e-8f;
  run_step(pool, kernels, a, n);
  result.norm = run_squared_norm(pool, kernels, a.grad, grad, n);
  if (run_nonfinite(pool, kernels, a.grad, grad, n)) result.norm = -1;
  return result;
}

bool same(const Outcome& a, const Outcome& b) {
  return a.weight == b.weight && a.state == b.state && a.copy == b.copy && a.norm == b.norm;
}

bool all_agree(ThreadPool& pool) {
  const Rule rules[] = {Rule::adam, Rule::adam_amsgrad, Rule::sgd, Rule::sgd_momentum, Rule::lion, Rule::adagrad};
  for (const std::size_t n :
       {std::size_t{0}, std::size_t{1}, std::size_t{31}, std::size_t{33}, kChunk, 2 * kChunk + 7})
    for (const Rule rule : rules)
      for (const DType grad : {DType::f32, DType::bf16, DType::f16}) {
        const Outcome expected = run(pool, *portable_kernels(), rule, grad, n);
        if (expected.norm < 0) return false;
        for (const Kernels* kernels : usable_kernels())
          if (!same(run(pool, *kernels, rule, grad, n), expected)) return false;
      }
  return true;
}

}  // namespace

int main() {
  ThreadPool pool(3);
  bool first = false, second = false;
  std::thread other([&] { first = all_agree(pool); });
  second = all_agree(pool);
  other.join();
  return first && second ? 0 : 1;
}
