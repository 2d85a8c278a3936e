// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <pybind11/pybind11.h>

namespace zerosharder {

// Adds the optimizer steps to the module.
void bind_optim(pybind11::module_& m);

}  // namespace zerosharder
