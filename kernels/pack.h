// Packing codes and scales into the packed format, and back. Portable C++ only: the compiler vectorizes the line loops.
#pragma once

#include "format.h"

namespace lowbit {

// 16, or what is left for the last panel.
inline int64_t rows_in_panel(const Layout& layout, int64_t panel) {
  const int64_t remaining = layout.n - panel * kPanelRows;
  return remaining < kPanelRows ? remaining : kPanelRows;
}

using PackArgs = ::lowbit_pack_args;
using UnpackArgs = ::lowbit_unpack_args;

// Packs panels [begin, end) into `packed`, the start of a buffer of layout.total_bytes, and writes the checksum of
// panel p to panel_checksums[p]. The header is written last, with seal().
// Different panels can be packed by different threads.
//
// A scale is stored as row scale (float32) x float16. If a power of two makes all scales and mins of a row exact in
// float16, that is the row scale, so that float16 scales (of a GGUF file, say) survive unchanged; otherwise it is 2^-15
// times the largest of them, which is then exact, and the others are rounded to 11 significant bits.
// Unpacking and packing again changes no value.
//
// With `row_scales` [n] they are taken instead, and scales and mins are in units of them, as unpack_panels() gives them.
//
// Returns an error when a code does not fit the width or a value is not finite.
LOWBIT_API Status pack_panels(const Layout& layout, const PackArgs& args, int64_t begin, int64_t end, void* packed,
                              uint64_t* panel_checksums, const float* row_scales = nullptr);

LOWBIT_API void seal(const Layout& layout, const uint64_t* panel_checksums, void* packed);

// Replaces the scales and mins (or nullptr) of a row by the values that packing stores for them.
void round_to_stored(float* scales, float* mins, int64_t groups);

// Unpacks panels [begin, end). With `row_scales` [n] scales and mins come as they are stored, in units of these.
LOWBIT_API void unpack_panels(const Layout& layout, const void* packed, int64_t begin, int64_t end,
                              const UnpackArgs& args, float* row_scales = nullptr);

}  // namespace lowbit
