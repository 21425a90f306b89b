#pragma once

namespace cutlass::util {

// Bytes of a row of `columns` four-bit values, two in each byte.
constexpr int packed_row_bytes(int columns) { return (columns + 1) / 2; }

}  // namespace cutlass::util
