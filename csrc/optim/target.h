// SPDX-License-Identifier: Apache-2.0
//
// ZS_TARGET("avx2,fma"): everything below in this file is compiled for these instructions. It comes after all
// includes: an inline function of a header compiled with them could be linked into code that runs everywhere.

#pragma once

#define ZS_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ZS_TARGET(isa) ZS_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define ZS_TARGET_END ZS_PRAGMA(clang attribute pop)
#else
#define ZS_TARGET(isa) ZS_PRAGMA(GCC target(isa))
#define ZS_TARGET_END
#endif
