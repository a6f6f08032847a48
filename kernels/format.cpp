#include "format.h"

#include <cinttypes>
#include <cstring>
#include <iterator>

namespace lowbit {
namespace {

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr uint64_t kOffsetBasis = 0xcbf29ce484222325u, kPrime = 0x100000001b3u;  // FNV-1a, 64 bit

uint64_t mix(uint64_t hash, uint64_t word) { return (hash ^ word) * kPrime; }

}  // namespace

// FNV-1a over 64-bit words (Fowler, Noll, Vo), in eight lanes so that the multiplications overlap. Each step is a
// bijection of its lane, so a change of any single word always changes the result.
uint64_t checksum(const void* data, int64_t size) {
  const char* bytes = static_cast<const char*>(data);
  uint64_t lane[8];
  for (int i = 0; i < 8; ++i) lane[i] = kOffsetBasis + static_cast<uint64_t>(i);
  int64_t at = 0;
  for (; at + 64 <= size; at += 64) {
    uint64_t word[8];
    std::memcpy(word, bytes + at, 64);
    for (int i = 0; i < 8; ++i) lane[i] = mix(lane[i], word[i]);
  }
  for (int i = 0; at < size; at += 8, ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(size - at < 8 ? size - at : 8));
    lane[i] = mix(lane[i], word);
  }
  uint64_t hash = kOffsetBasis;
  for (uint64_t value : lane) hash = mix(hash, value ^ (value >> 32));
  return hash;
}

uint64_t fold_checksum(uint64_t folded, uint64_t panel_checksum) { return mix(folded, panel_checksum); }

Status make_layout(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias,
                   Layout* layout, const int8_t* levels) {
  if (bits < 1 || bits > 8) return Status::error("bits is %d; expected 1 to 8", bits);
  if (n < 1 || n > kMaxDimension) {
    return Status::error("the number of output rows is %" PRId64 "; expected 1 to %" PRId64, n, kMaxDimension);
  }
  if (k < 1 || k > kMaxDimension) {
    return Status::error("the number of inputs is %" PRId64 "; expected 1 to %" PRId64, k, kMaxDimension);
  }
  if (group_size < 0 || group_size % kHalfInputs != 0 || group_size > kMaxDimension) {
    return Status::error("group size is %" PRId64 "; expected a multiple of %d up to %" PRId64
                         ", or 0 for one group per row",
                         group_size, kHalfInputs, kMaxDimension);
  }
  if (static_cast<size_t>(mapping) >= std::size(kMappings)) {
    return Status::error("mapping is %d; expected symmetric (0), affine (1) or levels (2)", static_cast<int>(mapping));
  }
  Layout l{};
  l.header_bytes = kHeaderBytes;
  if (has_table(mapping)) {
    if (!can_have_levels(bits)) {
      return Status::error("a table of levels has codes of %d bits; expected 2, 3 or 4", bits);
    }
    if (levels == nullptr) return Status::error("there are no levels; expected %d of them", 1 << bits);
    for (int i = 0; i < 1 << bits; ++i) {
      if (levels[i] == -128) return Status::error("level [%d] is -128; expected -127 to 127", i);
      l.levels[i] = levels[i];
    }
    l.header_bytes = kLevelsHeaderBytes;
  } else if (levels != nullptr) {
    return Status::error("there are levels with another mapping; expected them with the mapping levels only");
  }
  l.format = Format::panel16;
  l.bits = bits;
  l.mapping = mapping;
  l.has_bias = has_bias;
  l.n = n;
  l.k = k;
  l.group_size = group_size;
  l.blocks = (k + kBlockInputs - 1) / kBlockInputs;
  l.groups = group_size == 0 ? 1 : (k + group_size - 1) / group_size;
  const int64_t before_last = (l.groups - 1) * l.group_inputs();  // inputs of all groups except the last
  l.segments = (l.groups - 1) * l.group_segments() + Layout::segments_of(k - before_last);
  l.panels = (n + kPanelRows - 1) / kPanelRows;
  l.group_bytes = group_bytes(has_mins(mapping));
  l.block_bytes = int64_t{bits} * kLineBytes;
  l.head_offset = l.blocks * l.block_bytes + l.groups * l.group_bytes;
  l.panel_bytes = round_up(l.head_offset + kHeadBytes, 64);
  int64_t panels_bytes;
  if (__builtin_mul_overflow(l.panels, l.panel_bytes, &panels_bytes) ||
      __builtin_add_overflow(panels_bytes, l.header_bytes, &l.total_bytes)) {
    return Status::error("a matrix of %" PRId64 " x %" PRId64 " weights does not fit the address space", n, k);
  }
  *layout = l;
  return {};
}

Status set_rotation(int64_t inputs, Layout* layout) {
  const bool is_power = inputs > 0 && (inputs & (inputs - 1)) == 0;
  if (inputs != 0 && (!is_power || inputs < kLeastRotation || inputs > kMostRotation || layout->k % inputs != 0)) {
    return Status::error("the inputs are rotated in blocks of %" PRId64 "; expected 0 for none, or a power of two from %" PRId64
                         " to %" PRId64 " that divides the number of inputs, %" PRId64,
                         inputs, kLeastRotation, kMostRotation, layout->k);
  }
  layout->rotation = 0;
  while (int64_t{1} << layout->rotation < inputs) ++layout->rotation;
  return {};
}

Status set_activation_bits(int64_t bits, Layout* layout) {
  if (bits != 8 && bits != 16) return Status::error("activation bits are %" PRId64 "; expected 8 or 16", bits);
  if (bits == 16 && layout->format != Format::panel16) {
    return Status::error("format '%s' has activations of 8 bits; expected panel16 for activations of 16 bits",
                         name_of(layout->format).text);
  }
  layout->two_planes = bits == 16;
  return {};
}

FormatName name_of(Format format) {
  if (format == Format::panel16) return {"panel16"};
  FormatName name{};
  for (int i = 0; i < 4; ++i) {
    const char c = static_cast<char>(static_cast<uint32_t>(format) >> (8 * i));
    if (c == '\0') break;
    name.text[i] = c >= ' ' && c <= '~' ? c : '?';
  }
  return name;
}

uint64_t fold_panels(const void* data, const Layout& layout, uint64_t folded) {
  const char* panel = static_cast<const char*>(data) + layout.header_bytes;
  for (int64_t p = 0; p < layout.panels; ++p, panel += layout.panel_bytes) {
    folded = fold_checksum(folded, checksum(panel, layout.panel_bytes));
  }
  return folded;
}

}  // namespace lowbit
