// SPDX-License-Identifier: Apache-2.0
//
// Which kernels this CPU runs, and whole ranges over them.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "optim/kernels.h"
#include "optim/pool.h"

namespace zerosharder::optim {

// What this build and this CPU can both do, best first; "portable" is always last.
std::vector<const Kernels*> usable_kernels();

// By name, or the best for "auto". std::invalid_argument names what is usable.
const Kernels& find_kernels(const std::string& name);

// CPU features that the choice depends on, as the CPU and the operating system report them.
std::vector<std::string> cpu_features();

// These split [0, n) into chunks of kChunk elements whatever the number of threads, so results do not depend on
// it.
void run_step(ThreadPool& pool, const Kernels& kernels, const StepArgs& args, std::size_t n);
void run_bandwidth(ThreadPool& pool, const Kernels& kernels, const StepArgs& args, std::size_t n);
double run_squared_norm(ThreadPool& pool, const Kernels& kernels, const void* data, DType type, std::size_t n);
bool run_nonfinite(ThreadPool& pool, const Kernels& kernels, const void* data, DType type, std::size_t n);

}  // namespace zerosharder::optim
