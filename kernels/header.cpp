// Writes and reads the header of a packed matrix. Its format may be that of a loaded library, so this file uses the registry;
// format.cpp uses only format.h.

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
  uint8_t rotation;
  uint8_t activation_bits;  // 16, or 0 for 8
  int64_t n, k;
  uint32_t group_size;
  uint32_t vendor_format;
  int64_t total_bytes;
  uint64_t payload_checksum;
  uint64_t header_checksum;  // over the 56 bytes before it
};
static_assert(sizeof(Header) == kHeaderBytes);
static_assert(offsetof(Header, header_checksum) == 56);

// Follows the header of a weight with a table of levels.
struct LevelsHeader {
  int8_t levels[kMostLevels];
  uint8_t reserved[48];
};
static_assert(kHeaderBytes + sizeof(LevelsHeader) == kLevelsHeaderBytes);

// Over all bytes of the header except the checksum itself. `levels` is null without a table.
uint64_t header_checksum(const Header& header, const LevelsHeader* levels) {
  constexpr size_t kCovered = offsetof(Header, header_checksum);
  char bytes[kCovered + sizeof *levels];
  std::memcpy(bytes, &header, kCovered);
  if (levels != nullptr) std::memcpy(bytes + kCovered, levels, sizeof *levels);
  return checksum(bytes, static_cast<int64_t>(kCovered + (levels == nullptr ? 0 : sizeof *levels)));
}

constexpr int64_t kMaxVendorBytes = int64_t{1} << 62;
constexpr uint8_t kPanel16 = 0, kVendorFormat = 1;  // values of Header::format

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// All bytes of a vendor's format count as one panel.
uint64_t vendor_checksum(const void* data, const Layout& layout) {
  return fold_checksum(0, checksum(static_cast<const char*>(data) + kHeaderBytes, layout.total_bytes - kHeaderBytes));
}

}  // namespace

Status make_vendor_layout(const Layout& layout, Format format, Layout* result) {
  const PackedFormat* const known = find_format(format);
  if (known == nullptr) {
    return Status::error("packed weight has the format '%s', which no loaded library has; load its kernels first",
                         name_of(format).text);
  }
  return vendor_layout(layout, *known, result);
}

Status vendor_layout(const Layout& layout, const PackedFormat& format, Layout* result) {
  const FormatName name = name_of(format.format);
  if (has_table(layout.mapping)) {
    return Status::error("format '%s' does not hold weights with a table of levels", name.text);
  }
  if (layout.two_planes) {
    return Status::error("format '%s' has activations of 8 bits; this weight has activations of 16 bits: set them to 8 first",
                         name.text);
  }
  Layout l = layout;
  l.format = format.format;
  l.block_bytes = l.group_bytes = l.head_offset = l.panel_bytes = l.total_bytes = 0;
  const int64_t bytes = format.bytes(format.context, l);
  if (bytes < 1 || bytes > kMaxVendorBytes) {
    return Status::error("format '%s' does not hold %" PRId64 " x %" PRId64 " weights of %d bits, %s, group size %"
                         PRId64, name.text, l.n, l.k, l.bits,
                         name_of(l.mapping), l.group_size);
  }
  l.total_bytes = kHeaderBytes + round_up(bytes, 64);
  *result = l;
  return {};
}

void seal_vendor_format(const Layout& layout, void* data) {
  write_header(layout, vendor_checksum(data, layout), data);
}

void write_header(const Layout& layout, uint64_t payload_checksum, void* data) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  const bool has_levels = has_table(layout.mapping);
  header.version = static_cast<uint16_t>(format_version(layout));
  header.format = layout.format == Format::panel16 ? kPanel16 : kVendorFormat;
  header.bits = static_cast<uint8_t>(layout.bits);
  header.mapping = static_cast<uint8_t>(layout.mapping);
  header.has_bias = layout.has_bias;
  header.rotation = layout.rotation;
  header.activation_bits = layout.two_planes ? 16 : 0;
  header.n = layout.n;
  header.k = layout.k;
  header.group_size = static_cast<uint32_t>(layout.group_size);
  header.vendor_format = static_cast<uint32_t>(layout.format);
  header.total_bytes = layout.total_bytes;
  header.payload_checksum = payload_checksum;
  LevelsHeader levels{};
  std::memcpy(levels.levels, layout.levels, sizeof levels.levels);
  header.header_checksum = header_checksum(header, has_levels ? &levels : nullptr);
  std::memcpy(data, &header, sizeof header);
  if (has_levels) std::memcpy(static_cast<char*>(data) + sizeof header, &levels, sizeof levels);
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
  if (header.version < kFormatVersion || header.version > kPlanesVersion) {
    return Status::error("packed weight is of format version %d; this library reads versions %d to %d", header.version,
                         kFormatVersion, kPlanesVersion);
  }
  const bool has_levels = header.version == kLevelsVersion ||
                          (header.version >= kRotatedVersion && has_table(static_cast<Mapping>(header.mapping)));
  LevelsHeader levels{};
  if (has_levels) {
    if (size < kLevelsHeaderBytes) {
      return Status::error("packed weight has %" PRId64 " bytes; expected a header of %" PRId64
                           " bytes and more, as it has a table of levels",
                           size, kLevelsHeaderBytes);
    }
    std::memcpy(&levels, static_cast<const char*>(data) + sizeof header, sizeof levels);
  }
  if (header.header_checksum != header_checksum(header, has_levels ? &levels : nullptr)) {
    return Status::error("packed weight has an altered header: its checksum does not match");
  }
  const Format format = static_cast<Format>(header.vendor_format);
  if (has_levels && !has_table(static_cast<Mapping>(header.mapping))) {
    return Status::error("packed weight of version %d has mapping %d; expected 2, a table of levels", kLevelsVersion,
                         header.mapping);
  }
  const bool can_rotate = header.version >= kRotatedVersion;
  if (header.rotation > 62 || (header.rotation != 0 && !can_rotate) ||
      (header.rotation == 0 && header.version == kRotatedVersion)) {
    return Status::error("packed weight of version %d has blocks of 2^%d rotated inputs; expected them in version %d always, "
                         "and in earlier versions never", header.version, header.rotation, kRotatedVersion);
  }
  if (header.activation_bits != (header.version == kPlanesVersion ? 16 : 0)) {
    return Status::error("packed weight of version %d has activations of %d bits; expected 16 in version %d, and 0 (8 bits) "
                         "in earlier versions", header.version, header.activation_bits, kPlanesVersion);
  }
  if (header.format > kVendorFormat || (header.mapping > 1 && !has_levels) || header.has_bias > 1 ||
      (header.format == kPanel16) != (format == Format::panel16)) {
    return Status::error("packed weight has format %d, mapping %d, bias flag %d; expected each to be 0 or 1",
                         header.format, header.mapping, header.has_bias);
  }
  Layout expected;
  if (Status status = make_layout(header.n, header.k, header.bits, header.group_size,
                                  static_cast<Mapping>(header.mapping), header.has_bias != 0, &expected,
                                  has_levels ? levels.levels : nullptr);
      !status.ok()) {
    return status;
  }
  if (Status s = set_rotation(header.rotation == 0 ? 0 : int64_t{1} << header.rotation, &expected); !s.ok()) return s;
  expected.two_planes = header.activation_bits != 0;
  if (has_levels) {
    LevelsHeader canonical{};
    std::memcpy(canonical.levels, expected.levels, sizeof canonical.levels);
    if (std::memcmp(&canonical, &levels, sizeof levels) != 0) {
      return Status::error("packed weight has bytes after its %d levels; expected zeros", 1 << header.bits);
    }
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

uint64_t payload_checksum_of(const void* data) {
  uint64_t value;
  std::memcpy(&value, static_cast<const char*>(data) + offsetof(Header, payload_checksum), sizeof value);
  return value;
}

Status verify_payload(const void* data, const Layout& layout) {
  const uint64_t expected = payload_checksum_of(data);
  const uint64_t folded =
      layout.format == Format::panel16 ? fold_panels(data, layout, 0) : vendor_checksum(data, layout);
  if (folded != expected) {
    return Status::error("packed weight has altered bytes: their checksum is %016" PRIx64 "; the header says %016" PRIx64,
                         folded, expected);
  }
  return {};
}

}  // namespace lowbit
