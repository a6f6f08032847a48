// Packs codes and scales into the packed format, and unpacks them. Portable C++; the compiler vectorizes the loops over lines.
#pragma once

#include "format.h"

namespace lowbit {

// 16, or fewer in the last panel.
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
// A scale is stored as row scale (float32) x float16. If a power of two makes all scales and mins of a row exact in float16, it
// becomes the row scale, so that float16 scales, such as a GGUF file's, are exact. Otherwise the row scale is 2^-15 times the
// largest of them, which is then exact, and the others are rounded to 11 significant bits. Unpacking and packing again changes
// no value.
//
// `row_scales` [n], if given, are used instead; scales and mins are then in units of them, as from unpack_panels().
//
// Returns an error if a code does not fit the width or a value is not finite.
LOWBIT_API Status pack_panels(const Layout& layout, const PackArgs& args, int64_t begin, int64_t end, void* packed,
                              uint64_t* panel_checksums, const float* row_scales = nullptr);

LOWBIT_API void seal(const Layout& layout, const uint64_t* panel_checksums, void* packed);

// Rounds the scales and mins (or nullptr) of a row to the values that packing stores.
void round_to_stored(float* scales, float* mins, int64_t groups);

// Unpacks panels [begin, end). With `row_scales` [n], scales and mins are returned as stored, in units of the row scales.
LOWBIT_API void unpack_panels(const Layout& layout, const void* packed, int64_t begin, int64_t end,
                              const UnpackArgs& args, float* row_scales = nullptr);

}  // namespace lowbit
