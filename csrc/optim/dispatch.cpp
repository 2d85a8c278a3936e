// SPDX-License-Identifier: Apache-2.0

#include "optim/dispatch.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace zerosharder::optim {

namespace {

std::size_t chunks(std::size_t n) { return n / kChunk + (n % kChunk != 0 ? 1 : 0); }

template <class Function>
void over_chunks(ThreadPool& pool, std::size_t n, const Function& function) {
  pool.run(chunks(n), [&](std::size_t i) { function(i, i * kChunk, std::min(n, (i + 1) * kChunk)); });
}

// __builtin_cpu_supports also asks the operating system whether it saves the registers.
bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> found;
  if (avx512_kernels() != nullptr && has_avx512()) found.push_back(avx512_kernels());
  if (avx2_kernels() != nullptr && has_avx2()) found.push_back(avx2_kernels());
  if (neon_kernels() != nullptr) found.push_back(neon_kernels());
  found.push_back(portable_kernels());
  return found;
}

const Kernels& find_kernels(const std::string& name) {
  static const std::vector<const Kernels*> usable = usable_kernels();
  if (name == "auto") return *usable.front();
  std::string names = "auto";
  for (const Kernels* kernels : usable) {
    if (name == kernels->name) return *kernels;
    names += std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("isa '" + name + "' is not usable here, choose from: " + names);
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
  if (__builtin_cpu_supports("fma")) found.push_back("fma");
  if (__builtin_cpu_supports("f16c")) found.push_back("f16c");
  if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
  if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
  if (__builtin_cpu_supports("avx512dq")) found.push_back("avx512dq");
  if (__builtin_cpu_supports("avx512vl")) found.push_back("avx512vl");
#elif defined(__aarch64__)
  found.push_back("neon");
#endif
  return found;
}

void run_step(ThreadPool& pool, const Kernels& kernels, const StepArgs& args, std::size_t n) {
  over_chunks(pool, n, [&](std::size_t, std::size_t begin, std::size_t end) { kernels.step(args, begin, end); });
}

void run_bandwidth(ThreadPool& pool, const Kernels& kernels, const StepArgs& args, std::size_t n) {
  over_chunks(pool, n,
              [&](std::size_t, std::size_t begin, std::size_t end) { kernels.bandwidth(args, begin, end); });
}

double run_squared_norm(ThreadPool& pool, const Kernels& kernels, const void* data, DType type, std::size_t n) {
  std::vector<double> sums(chunks(n));
  over_chunks(pool, n, [&](std::size_t i, std::size_t begin, std::size_t end) {
    sums[i] = kernels.squared_norm(data, type, begin, end);
  });
  // A fixed tree over the chunks: neighbours, then neighbours of those.
  for (std::size_t width = sums.size(); width > 1; width = (width + 1) / 2) {
    for (std::size_t i = 0; i < width / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (width % 2 != 0) sums[width / 2] = sums[width - 1];
  }
  return sums.empty() ? 0.0 : sums[0];
}

bool run_nonfinite(ThreadPool& pool, const Kernels& kernels, const void* data, DType type, std::size_t n) {
  std::atomic<bool> found{false};
  over_chunks(pool, n, [&](std::size_t, std::size_t begin, std::size_t end) {
    if (found.load(std::memory_order_relaxed)) return;
    if (kernels.nonfinite(data, type, begin, end)) found.store(true, std::memory_order_relaxed);
  });
  return found.load();
}

}  // namespace zerosharder::optim
