// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstddef>
#include <cstdint>

namespace zerosharder::io {

// CRC-32C (Castagnoli polynomial, reflected; RFC 3720) by the processor's instruction where it has one.
std::uint32_t crc32c(const void* data, std::size_t nbytes) noexcept;

// The same by tables, on every processor.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes) noexcept;

}  // namespace zerosharder::io
