#include "format.h"

#include <bit>
#include <cinttypes>
#include <cstring>

#include "registry.h"

namespace lowbit {
namespace {

static_assert(std::endian::native == std::endian::little, "the packed format is little endian");

constexpr char kMagic[8] = {'\x89', 'L', 'O', 'W', 'B', 'I', 'T', '\n'};

struct Header {
  char magic[8];
  uint16_t version;
  uint8_t format;
  uint8_t bits;
  uint8_t mapping;
  uint8_t has_bias;
  uint16_t reserved0;
  int64_t n, k;
  uint32_t group_size;
  uint32_t vendor_format;
  int64_t total_bytes;
  uint64_t payload_checksum;
  uint64_t header_checksum;  // over the 56 bytes before it
};
static_assert(sizeof(Header) == kHeaderBytes);
static_assert(offsetof(Header, header_checksum) == 56);

constexpr int64_t kMaxVendorBytes = int64_t{1} << 62;
constexpr uint8_t kPanel16 = 0, kVendorFormat = 1;  // values of Header::format

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

// All of a vendor's bytes count as one panel.
static uint64_t vendor_checksum(const void* data, const Layout& layout) {
  return fold_checksum(0, checksum(static_cast<const char*>(data) + kHeaderBytes, layout.total_bytes - kHeaderBytes));
}

Status make_layout(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias,
                   Layout* layout) {
  if (bits < 1 || bits > 8) return Status::error("bits is %d; expected 1 to 8", bits);
  if (n < 1 || n > kMaxDimension) {
    return Status::error("the number of output rows is %" PRId64 "; expected 1 to %" PRId64, n, kMaxDimension);
  }
  if (k < 1 || k > kMaxDimension) {
    return Status::error("the number of inputs is %" PRId64 "; expected 1 to %" PRId64, k, kMaxDimension);
  }
  if (group_size < 0 || group_size % kHalfInputs != 0 || group_size > kMaxGroupInputs) {
    return Status::error("group size is %" PRId64 "; expected a multiple of %d up to %" PRId64
                         ", or 0 for one group per row",
                         group_size, kHalfInputs, kMaxGroupInputs);
  }
  if (group_size == 0 && k > kMaxGroupInputs) {
    return Status::error("one group per row spans %" PRId64 " inputs; expected at most %" PRId64
                         ": choose a group size",
                         k, kMaxGroupInputs);
  }
  Layout l{};
  l.format = Format::panel16;
  l.bits = bits;
  l.mapping = mapping;
  l.has_bias = has_bias;
  l.n = n;
  l.k = k;
  l.group_size = group_size;
  l.blocks = (k + kBlockInputs - 1) / kBlockInputs;
  l.groups = group_size == 0 ? 1 : (k + group_size - 1) / group_size;
  l.panels = (n + kPanelRows - 1) / kPanelRows;
  l.group_bytes = kPanelRows * (mapping == Mapping::affine ? 4 : 2);
  l.block_bytes = int64_t{bits} * kLineBytes;
  l.head_offset = l.blocks * l.block_bytes + l.groups * l.group_bytes;
  l.panel_bytes = round_up(l.head_offset + kHeadBytes, 64);
  int64_t panels_bytes;
  if (__builtin_mul_overflow(l.panels, l.panel_bytes, &panels_bytes) ||
      __builtin_add_overflow(panels_bytes, kHeaderBytes, &l.total_bytes)) {
    return Status::error("a matrix of %" PRId64 " x %" PRId64 " weights does not fit the address space", n, k);
  }
  *layout = l;
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

Status make_vendor_layout(const Layout& layout, Format format, Layout* vendor_layout) {
  const PackedFormat* const found = find_format(format);
  if (found == nullptr) {
    return Status::error("packed weight has the format '%s', which no loaded library has; load its kernels first",
                         name_of(format).text);
  }
  Layout l = layout;
  l.format = format;
  l.block_bytes = l.group_bytes = l.head_offset = l.panel_bytes = l.total_bytes = 0;
  const int64_t bytes = found->bytes(l);
  if (bytes < 1 || bytes > kMaxVendorBytes) {
    return Status::error("format '%s' does not hold %" PRId64 " x %" PRId64 " weights of %d bits, %s, group size %"
                         PRId64, name_of(format).text, l.n, l.k, l.bits,
                         l.mapping == Mapping::affine ? "affine" : "symmetric", l.group_size);
  }
  l.total_bytes = kHeaderBytes + round_up(bytes, 64);
  *vendor_layout = l;
  return {};
}

void seal_vendor_format(const Layout& layout, void* data) {
  write_header(layout, vendor_checksum(data, layout), data);
}

void write_header(const Layout& layout, uint64_t payload_checksum, void* data) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kFormatVersion;
  header.format = layout.format == Format::panel16 ? kPanel16 : kVendorFormat;
  header.bits = static_cast<uint8_t>(layout.bits);
  header.mapping = static_cast<uint8_t>(layout.mapping);
  header.has_bias = layout.has_bias;
  header.n = layout.n;
  header.k = layout.k;
  header.group_size = static_cast<uint32_t>(layout.group_size);
  header.vendor_format = static_cast<uint32_t>(layout.format);
  header.total_bytes = layout.total_bytes;
  header.payload_checksum = payload_checksum;
  header.header_checksum = checksum(&header, offsetof(Header, header_checksum));
  std::memcpy(data, &header, sizeof header);
}

Status read_header(const void* data, int64_t size, Layout* layout) {
  if (size < kHeaderBytes) {
    return Status::error("packed weight has %" PRId64 " bytes; expected a header of %" PRId64 " bytes and more", size,
                         kHeaderBytes);
  }
  Header header;
  std::memcpy(&header, data, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) {
    return Status::error("not a packed weight: its first eight bytes are %02x%02x%02x%02x%02x%02x%02x%02x; "
                         "expected 894c4f574249540a",
                         header.magic[0] & 255, header.magic[1] & 255, header.magic[2] & 255, header.magic[3] & 255,
                         header.magic[4] & 255, header.magic[5] & 255, header.magic[6] & 255, header.magic[7] & 255);
  }
  if (header.version != kFormatVersion) {
    return Status::error("packed weight is of format version %d; this library reads version %d", header.version,
                         kFormatVersion);
  }
  if (header.header_checksum != checksum(&header, offsetof(Header, header_checksum))) {
    return Status::error("packed weight has an altered header: its checksum does not match");
  }
  const Format format = static_cast<Format>(header.vendor_format);
  if (header.format > kVendorFormat || header.mapping > 1 || header.has_bias > 1 || header.reserved0 != 0 ||
      (header.format == kPanel16) != (format == Format::panel16)) {
    return Status::error("packed weight has format %d, mapping %d, bias flag %d; expected each to be 0 or 1",
                         header.format, header.mapping, header.has_bias);
  }
  Layout expected;
  if (Status status = make_layout(header.n, header.k, header.bits, header.group_size,
                                  static_cast<Mapping>(header.mapping), header.has_bias != 0, &expected);
      !status.ok()) {
    return status;
  }
  if (format != Format::panel16) {
    if (Status status = make_vendor_layout(expected, format, &expected); !status.ok()) return status;
  }
  if (header.total_bytes != expected.total_bytes || size != expected.total_bytes) {
    return Status::error("packed weight has %" PRId64 " bytes, its header says %" PRId64 "; expected %" PRId64
                         " for %" PRId64 " x %" PRId64 " weights of %d bits",
                         size, header.total_bytes, expected.total_bytes, header.n, header.k, header.bits);
  }
  *layout = expected;
  return {};
}

uint64_t fold_panels(const void* data, const Layout& layout, uint64_t folded) {
  const char* panel = static_cast<const char*>(data) + kHeaderBytes;
  for (int64_t p = 0; p < layout.panels; ++p, panel += layout.panel_bytes) {
    folded = fold_checksum(folded, checksum(panel, layout.panel_bytes));
  }
  return folded;
}

Status verify_payload(const void* data, const Layout& layout) {
  Header header;
  std::memcpy(&header, data, sizeof header);
  const uint64_t folded =
      layout.format == Format::panel16 ? fold_panels(data, layout, 0) : vendor_checksum(data, layout);
  if (folded != header.payload_checksum) {
    return Status::error("packed weight has altered bytes: their checksum is %016" PRIx64 "; the header says %016" PRIx64,
                         folded, header.payload_checksum);
  }
  return {};
}

}  // namespace lowbit
