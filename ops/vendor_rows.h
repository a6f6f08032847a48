// Packs or unpacks rows of a matrix in a vendor's format, on all threads.
#pragma once

#include "../kernels/library.h"
#include "schedule.h"

namespace lowbit {

// Approximate number of weights per claim of rows to pack or unpack.
inline constexpr int64_t kPackedWeights = 1 << 18;

// Calls body(begin, end) over all rows, in pieces that the format supports.
template <class Body>
void vendor_rows(const PackedFormat& format, const Layout& layout, const Parallel& parallel, const Body& body) {
  const int64_t unit = format.rows_at_once == 0 ? layout.n : format.rows_at_once;
  const int64_t rows = (1 + kPackedWeights / layout.k / unit) * unit;
  parallel_1d(parallel, layout.n, rows, [&](int, int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace lowbit
