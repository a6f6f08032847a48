// The packed format: what the bytes mean. One layout for every ISA; docs/format.md draws it.
//
//   header   64 bytes, or 128 with a table of levels; little endian, verified before anything else is read
//   panel 0  16 output rows, in the order in which a kernel reads them, so that a matrix is one stream:
//            the blocks, each followed by the scales of the groups that end in it; then the head; padded to 64 bytes
//   panel 1  ...
//
//   block    32 inputs: `bits` lines of 64 bytes (bits/codec.h)
//   scales   of a group: 16 float16 scales, then (affine) 16 float16 mins
//   head     3 x 16 float32: row scale, row sum, bias
//
// A weight is  row_scale * scale * level(code)           (symmetric; codec.h has level())
//          or  row_scale * (scale * code + min)          (affine)
//          or  row_scale * scale * levels[code]          (levels: the header has the table).
// The row sum is the sum of a row's weights divided by its row scale. Kernels do not read it: it was used for activations with
// a zero point, before the first release of lowbit. Rows and inputs beyond n and k are padding: their scales and heads are
// zero, their codes may have any value.
//
// In a layer with rotated inputs, these are the weights of the rotated inputs: rotate_inputs() in ukernel.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits/codec.h"
#include "export.h"
#include "lowbit_ukernel.h"
#include "mapping.h"
#include "status.h"

namespace lowbit {

// The layout of the bytes after the header: panel16, described above, or the format of a loaded library (library.h). Returns
// the format with the name `name`, of one to four letters, digits, '-' or '_'.
constexpr Format vendor_format(const char* name) {
  uint32_t id = 0;
  for (int i = 0; i < 4 && name[i] != '\0'; ++i) id |= uint32_t{static_cast<unsigned char>(name[i])} << (8 * i);
  return static_cast<Format>(id);
}

struct FormatName {
  char text[8];
};
LOWBIT_API FormatName name_of(Format format);

// The version in the header: 4 with activations in two planes, otherwise 3 with rotated inputs, otherwise 2 with a table of
// levels. Older readers refuse these. Otherwise 1, whose bytes have never changed.
inline constexpr int kFormatVersion = 1, kLevelsVersion = 2, kRotatedVersion = 3, kPlanesVersion = 4;
inline constexpr int64_t kHeaderBytes = 64, kLevelsHeaderBytes = 128;
inline constexpr int64_t kHeadBytes = 3 * kPanelRows * 4;
inline constexpr int64_t kMaxDimension = int64_t{1} << 31;
// The largest number of inputs that share a scale of the activations (ukernel.h).
inline constexpr int64_t kSegmentInputs = LOWBIT_SEGMENT_INPUTS;

using Layout = ::lowbit_layout;
static_assert(kPanelRows == LOWBIT_PANEL_ROWS && kBlockInputs == LOWBIT_BLOCK_INPUTS && kHalfInputs == LOWBIT_HALF_INPUTS);
static_assert(kLineBytes == LOWBIT_LINE_BYTES && kMostLevels == LOWBIT_MOST_LEVELS);

// Checks the parameters and fills in the sizes. `levels` has 2^bits entries if has_table(mapping), and is null otherwise.
LOWBIT_API Status make_layout(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias,
                              Layout* layout, const int8_t* levels = nullptr);

// Rotates the inputs in blocks of `inputs`: 0 for none, or a power of two from kLeastRotation to kMostRotation that divides k.
inline constexpr int64_t kLeastRotation = 16, kMostRotation = 128;
LOWBIT_API Status set_rotation(int64_t inputs, Layout* layout);

constexpr int format_version(const Layout& layout) {
  if (layout.two_planes) return kPlanesVersion;
  if (layout.rotation != 0) return kRotatedVersion;
  return has_table(layout.mapping) ? kLevelsVersion : kFormatVersion;
}

// Sets the activation bits: 8 for one int8 plane, 16 for two. Only the header depends on them.
LOWBIT_API Status set_activation_bits(int64_t bits, Layout* layout);

// The same matrix in a vendor's format. Only its name and total_bytes are set; the sizes of a panel's parts are zero. Refuses
// weights with a table of levels.
LOWBIT_API Status make_vendor_layout(const Layout& layout, Format format, Layout* vendor_layout);

// Verifies the header of `size` bytes at `data` (any alignment) against the buffer. Takes about 30 cycles.
LOWBIT_API Status read_header(const void* data, int64_t size, Layout* layout);

// Verifies the checksum of all bytes after a header that read_header() accepted.
LOWBIT_API Status verify_payload(const void* data, const Layout& layout);

// For packing: the checksum of a panel, the combined checksum of all panels, and the header that stores it.
uint64_t checksum(const void* data, int64_t size);
uint64_t fold_checksum(uint64_t folded, uint64_t panel_checksum);
LOWBIT_API void write_header(const Layout& layout, uint64_t payload_checksum, void* data);
// The checksum that the header at `data` states for the bytes after it.
LOWBIT_API uint64_t payload_checksum_of(const void* data);

// Combines the checksums of all panels after the header at `data` with `folded`, which starts at 0. For a matrix that is packed
// in bands of whole panels, one band per call.
LOWBIT_API uint64_t fold_panels(const void* data, const Layout& layout, uint64_t folded);

// Writes the header of a matrix in a vendor's format. The bytes after the header are already written.
void seal_vendor_format(const Layout& layout, void* data);

}  // namespace lowbit
