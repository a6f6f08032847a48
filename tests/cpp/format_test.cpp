// The header and the checksum: what is written, and that everything else is refused.

#include "../../kernels/format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "support/guarded.h"
#include "support/matrix.h"

namespace lowbit::test {
namespace {

constexpr int64_t kNoOverride = -1;

// The header's fields at their offsets, restated; the checksum always matches the fields.
struct Fields {
  uint16_t version = 1;
  uint8_t format = 0, bits = 4, mapping = 0, has_bias = 0;
  uint8_t rotation = 0, activation_bits = 0;
  int64_t n = 3, k = 40;
  uint32_t group_size = 32, reserved1 = 0;
  int64_t total_bytes = kNoOverride;  // computed from the others
  uint64_t payload_checksum = 0;

  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> header = {0x89, 'L', 'O', 'W', 'B', 'I', 'T', '\n'};
    const auto add = [&](auto value) {
      const uint8_t* raw = reinterpret_cast<const uint8_t*>(&value);
      header.insert(header.end(), raw, raw + sizeof value);
    };
    add(version), add(format), add(bits), add(mapping), add(has_bias), add(rotation), add(activation_bits), add(n), add(k);
    add(group_size), add(reserved1), add(total_bytes == kNoOverride ? expected_bytes() : total_bytes), add(payload_checksum);
    add(checksum_of(header.data(), 56));
    return header;
  }
  int64_t expected_bytes() const {
    const int64_t group = group_size == 0 ? k : group_size;
    const int64_t groups = group > 0 ? (k + group - 1) / group : 0;
    return 64 + (n + 15) / 16 * ((((k + 31) / 32 * bits * 64 + groups * (mapping ? 64 : 32) + 192) + 63) / 64 * 64);
  }
};

// Reads a header of a buffer that ends at an inaccessible page: `size` bytes, of which only the header is filled in.
Status read(const std::vector<uint8_t>& header, int64_t size, Layout* layout) {
  Guarded buffer(size);
  std::memset(buffer.data(), 0, static_cast<size_t>(size));
  std::copy_n(header.begin(), std::min<int64_t>(static_cast<int64_t>(header.size()), size), buffer.data());
  buffer.freeze();
  const Status status = read_header(buffer.data(), size, layout);
  EXPECT_TRUE(buffer.intact());
  return status;
}

testing::AssertionResult refused(const Fields& fields, const char* says, int64_t size = 4096) {
  Layout layout;
  const Status status = read(fields.bytes(), size, &layout);
  if (status.ok()) return testing::AssertionFailure() << "accepted";
  if (std::strstr(status.message(), says) != nullptr) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the message is '" << status.message() << "', without '" << says << "'";
}

std::vector<uint8_t> small_packed(int bits, Mapping mapping) {
  Random random(5);
  return packed(random_weights(layout_of(3, 40, bits, 32, mapping, true), random));
}

TEST(Format, RoundTripOfEveryField) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      for (const bool has_bias : {false, true}) {
        for (const int64_t group_size : {0, 16, 48, 64}) {
          const Layout written = layout_of(21, 70, bits, group_size, mapping, has_bias);
          Random random(1);
          const std::vector<uint8_t> bytes = packed(random_weights(written, random));
          for (const int64_t gap : {0, 1, 3}) {
            Guarded buffer(written.total_bytes, Wall::after, gap);
            std::memcpy(buffer.data(), bytes.data(), bytes.size());
            Layout read{};
            const Status status = read_header(buffer.data(), buffer.size(), &read);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_EQ(read.bits, bits);
            EXPECT_EQ(read.mapping, mapping);
            EXPECT_EQ(read.has_bias, has_bias);
            EXPECT_EQ(read.n, 21);
            EXPECT_EQ(read.k, 70);
            EXPECT_EQ(read.group_size, group_size);
            EXPECT_EQ(read.groups, group_size == 0 ? 1 : (70 + group_size - 1) / group_size);
            EXPECT_EQ(read.blocks, 3);
            EXPECT_EQ(read.panels, 2);
            EXPECT_EQ(read.header_bytes, mapping == Mapping::levels ? 128 : 64);
            EXPECT_EQ(std::memcmp(read.levels, written.levels, sizeof read.levels), 0);
            EXPECT_EQ(read.total_bytes, written.total_bytes);
            EXPECT_TRUE(verify_payload(buffer.data(), read).ok());
          }
        }
      }
    }
  }
}

TEST(Format, RoundTripOfRotations) {
  for (const Mapping mapping : {Mapping::symmetric, Mapping::affine, Mapping::levels}) {
    for (const int64_t block : {16, 32, 64, 128}) {
      const Layout written = rotated(layout_of(21, 3 * block, 4, 32, mapping, false), block);
      Random random(1);
      const std::vector<uint8_t> bytes = packed(random_weights(written, random));
      Layout read{};
      const Status status = read_header(bytes.data(), static_cast<int64_t>(bytes.size()), &read);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(bytes[8], 3) << "the version";
      EXPECT_EQ(read.rotated_inputs(), block);
      EXPECT_EQ(read.mapping, mapping);
      EXPECT_EQ(std::memcmp(read.levels, written.levels, sizeof read.levels), 0);
    }
  }
}

TEST(Format, RoundTripOfPlanes) {
  for (const Mapping mapping : {Mapping::symmetric, Mapping::affine, Mapping::levels}) {
    for (const int64_t block : {0, 16}) {
      const Layout one = rotated(layout_of(21, 48, 4, 32, mapping, true), block), written = in_planes(one);
      Random random(1), again(1);
      std::vector<uint8_t> bytes = packed(random_weights(written, random));
      const int64_t size = static_cast<int64_t>(bytes.size());
      Layout read{};
      const Status status = read_header(bytes.data(), size, &read);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(bytes[8], 4) << "the version";
      EXPECT_EQ(bytes[15], 16);
      EXPECT_EQ(read.activation_bits(), 16);
      EXPECT_EQ(read.rotated_inputs(), block);
      EXPECT_EQ(read.mapping, mapping);
      EXPECT_EQ(std::memcmp(read.levels, written.levels, sizeof read.levels), 0);
      EXPECT_TRUE(verify_payload(bytes.data(), read).ok());
      // With one plane the bytes equal those of packing: only the header differs.
      write_header(one, payload_checksum_of(bytes.data()), bytes.data());
      EXPECT_EQ(bytes, packed(random_weights(one, again)));
    }
  }
}

TEST(Format, HeaderIsTheOneWrittenHere) {
  const std::vector<uint8_t> bytes = small_packed(4, Mapping::affine);
  Fields fields{.mapping = 1, .has_bias = 1};
  const int64_t panel = static_cast<int64_t>(bytes.size()) - 64;
  fields.payload_checksum = checksum_of(bytes.data() + 64, panel) * 1099511628211u;  // the fold of one panel
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 64), fields.bytes());
  Layout layout;
  EXPECT_TRUE(read(Fields().bytes(), Fields().expected_bytes(), &layout).ok()) << "the base of the refusals below";
}

TEST(Format, SizesAreMultiplesOf64) {
  for (int64_t n : {1, 15, 16, 17, 40}) {
    for (int64_t k : {1, 16, 17, 33, 100}) {
      for (int64_t group_size : {0, 16, 48, 128}) {
        for (int bits = 1; bits <= 8; ++bits) {
          EXPECT_EQ(layout_of(n, k, bits, group_size, Mapping::symmetric, false).total_bytes % 64, 0);
        }
      }
    }
  }
}

TEST(Format, EveryAlterationOfTheHeaderIsRefused) {
  Random random(6);
  const Layout of_rotated = rotated(layout_of(3, 64, 3, 32, Mapping::symmetric, true), 64);
  for (std::vector<uint8_t> bytes : {small_packed(3, Mapping::symmetric), small_packed(3, Mapping::levels),
                                     packed(random_weights(of_rotated, random)),
                                     packed(random_weights(in_planes(of_rotated), random))}) {
    const int64_t size = static_cast<int64_t>(bytes.size());
    Layout layout;
    ASSERT_TRUE(read_header(bytes.data(), size, &layout).ok());
    for (int at = 0; at < layout.header_bytes; ++at) {
      const uint8_t original = bytes[static_cast<size_t>(at)];
      for (int value = 0; value < 256; ++value) {
        if (value == original) continue;
        bytes[static_cast<size_t>(at)] = static_cast<uint8_t>(value);
        Layout found;
        const Status status = read_header(bytes.data(), size, &found);
        ASSERT_FALSE(status.ok()) << "version " << int{bytes[8]} << ": byte " << at << " = " << value;
        ASSERT_GT(std::strlen(status.message()), 20u);
      }
      bytes[static_cast<size_t>(at)] = original;
    }
  }
}

TEST(Format, OtherLengthsAreRefused) {
  for (const Mapping mapping : {Mapping::symmetric, Mapping::levels}) {
    const std::vector<uint8_t> bytes = small_packed(3, mapping);
    const int64_t size = static_cast<int64_t>(bytes.size());
    Layout layout;
    for (int64_t shorter = 0; shorter < size; ++shorter) {
      ASSERT_FALSE(read({bytes.begin(), bytes.begin() + shorter}, shorter, &layout).ok()) << shorter;
    }
    for (const int64_t more : {1, 63, 64, 1000}) EXPECT_FALSE(read(bytes, size + more, &layout).ok());
    EXPECT_TRUE(read(bytes, size, &layout).ok());
  }
}

// Headers of version 2 with wrong fields and a matching checksum.
TEST(Format, HostileLevelsAreRefused) {
  struct Change {
    size_t at;
    uint8_t value;
    const char* says;
  };
  const std::vector<uint8_t> good = small_packed(3, Mapping::levels);
  const auto sealed = [](std::vector<uint8_t> bytes) {  // the checksum excludes itself
    std::vector<uint8_t> covered(bytes.begin(), bytes.begin() + 56);
    covered.insert(covered.end(), bytes.begin() + 64, bytes.begin() + 128);
    const uint64_t checksum = checksum_of(covered.data(), static_cast<int64_t>(covered.size()));
    std::memcpy(bytes.data() + 56, &checksum, sizeof checksum);
    return bytes;
  };
  const int64_t size = static_cast<int64_t>(good.size());
  Layout layout;
  EXPECT_EQ(sealed(good), good);
  for (const Change& change : {Change{11, 5, "codes of 5 bits; expected 2, 3 or 4"}, {11, 1, "codes of 1 bits"},
                               {11, 8, "codes of 8 bits"}, {12, 0, "has mapping 0; expected 2"},
                               {12, 1, "has mapping 1; expected 2"}, {12, 3, "has mapping 3; expected 2"},
                               {10, 1, "format 1"}, {14, 1, "blocks of 2^1 rotated"}, {15, 1, "activations of 1 bits"},
                               {64, 0x80, "level [0] is -128"},
                               {71, 0x80, "level [7] is -128"}, {72, 1, "bytes after its 8 levels; expected zeros"},
                               {79, 0x80, "bytes after its 8 levels"}, {80, 1, "bytes after its 8 levels"},
                               {127, 255, "bytes after its 8 levels"}}) {
    std::vector<uint8_t> bytes = good;
    bytes[change.at] = change.value;
    const Status status = read(sealed(bytes), size, &layout);
    ASSERT_FALSE(status.ok()) << change.at;
    EXPECT_NE(std::strstr(status.message(), change.says), nullptr) << status.message();
  }
  // A version without levels.
  EXPECT_TRUE(refused({.mapping = 2}, "mapping 2"));
}

// A byte of 0x80 and more is not sign-extended.
TEST(Format, WhatIsNoPackedWeightIsShown) {
  std::vector<uint8_t> header(64);
  const uint8_t first[] = {0xf1, 0x02, 0xe3, 0x04, 0xd5, 0x06, 0xc7, 0x08, 0xb9};
  std::copy_n(first, sizeof first, header.begin());
  Layout layout;
  EXPECT_STREQ(read(header, 64, &layout).message(),
               "not a packed weight: its first eight bytes are f102e304d506c708; expected 894c4f574249540a");
}

TEST(Format, OtherVersionsAreRefused) {
  EXPECT_TRUE(refused({.version = 0}, "version 0; this library reads versions 1 to 4"));
  EXPECT_TRUE(refused({.version = 5}, "version 5; this library reads versions 1 to 4"));
  EXPECT_TRUE(refused({.version = 0xffff}, "version 65535"));
}

// Headers with wrong fields and a matching checksum.
TEST(Format, HostileHeadersAreRefused) {
  EXPECT_TRUE(refused({.format = 1}, "format 1"));
  EXPECT_TRUE(refused({.bits = 0}, "bits is 0; expected 1 to 8"));
  EXPECT_TRUE(refused({.bits = 9}, "bits is 9; expected 1 to 8"));
  EXPECT_TRUE(refused({.bits = 255}, "bits is 255"));
  EXPECT_TRUE(refused({.mapping = 2}, "mapping 2"));
  EXPECT_TRUE(refused({.has_bias = 2}, "bias flag 2"));
  EXPECT_TRUE(refused({.reserved1 = 1}, "format 0"));
  EXPECT_TRUE(refused({.n = 0}, "output rows is 0; expected 1 to"));
  EXPECT_TRUE(refused({.n = -1}, "output rows is -1"));
  EXPECT_TRUE(refused({.n = INT64_MIN, .total_bytes = 4096}, "output rows is -9223372036854775808"));
  EXPECT_TRUE(refused({.n = INT64_MAX, .total_bytes = 4096}, "output rows is 9223372036854775807"));
  EXPECT_TRUE(refused({.k = 0, .total_bytes = 4096}, "inputs is 0"));
  EXPECT_TRUE(refused({.k = -40, .total_bytes = 4096}, "inputs is -40"));
  EXPECT_TRUE(refused({.k = INT64_MAX, .total_bytes = 4096}, "inputs is 9223372036854775807"));
  EXPECT_TRUE(refused({.group_size = 8}, "group size is 8; expected a multiple of 16"));
  EXPECT_TRUE(refused({.group_size = 33}, "group size is 33"));
  EXPECT_TRUE(refused({.group_size = 0xfffffff0u}, "group size is 4294967280"));
  EXPECT_TRUE(refused({.total_bytes = 0}, "its header says 0"));
  EXPECT_TRUE(refused({.total_bytes = -64}, "its header says -64"));
  EXPECT_TRUE(refused({.total_bytes = 4096}, "its header says 4096"));
  EXPECT_TRUE(refused({.total_bytes = INT64_MAX}, "its header says 9223372036854775807"));
  // The largest possible matrix, 2^62 bytes of weights, in a buffer of 4096 bytes.
  const int64_t most = kMaxDimension;
  EXPECT_TRUE(
      refused({.bits = 8, .mapping = 1, .n = most, .k = most, .group_size = 16, .total_bytes = 4096}, "4096 bytes"));
  // A valid header in a buffer of another size.
  EXPECT_TRUE(refused({.n = 64}, "packed weight has 4096 bytes"));
  EXPECT_TRUE(refused({}, "packed weight has 4096 bytes"));
}

// Version 4, and no other version, has activations of 16 bits.
TEST(Format, HostileActivationBitsAreRefused) {
  for (const uint8_t bits : {1, 8, 16, 255}) {
    EXPECT_TRUE(refused({.activation_bits = bits}, "version 1 has activations of"));
    EXPECT_TRUE(refused({.version = 3, .rotation = 4, .activation_bits = bits, .k = 64}, "version 3 has activations of"));
  }
  for (const uint8_t bits : {0, 1, 8, 15, 17, 255}) {
    EXPECT_TRUE(refused({.version = 4, .activation_bits = bits}, "expected 16 in version 4"));
  }
  EXPECT_TRUE(refused({.version = 4, .mapping = 3, .activation_bits = 16}, "mapping 3"));
  EXPECT_TRUE(refused({.version = 4, .rotation = 3, .activation_bits = 16}, "blocks of 8; expected 0 for none"));
  EXPECT_TRUE(refused({.version = 4, .activation_bits = 16}, "packed weight has 4096 bytes")) << "right about itself";
  Layout layout = layout_of(3, 48, 4, 32, Mapping::symmetric, false);
  for (const int64_t bits : {-8, 0, 1, 7, 9, 12, 32}) EXPECT_FALSE(set_activation_bits(bits, &layout).ok()) << bits;
  for (const int64_t bits : {16, 8}) {
    EXPECT_TRUE(set_activation_bits(bits, &layout).ok());
    EXPECT_EQ(layout.activation_bits(), bits);
  }
}

// Version 3, and no earlier version, has rotated inputs.
TEST(Format, HostileRotationsAreRefused) {
  EXPECT_TRUE(refused({.rotation = 5}, "version 1 has blocks of 2^5 rotated inputs; expected them in version 3 always"));
  EXPECT_TRUE(refused({.version = 3}, "version 3 has blocks of 2^0 rotated inputs"));
  EXPECT_TRUE(refused({.version = 3, .rotation = 255}, "blocks of 2^255"));
  EXPECT_TRUE(refused({.version = 3, .rotation = 62, .k = 64}, "blocks of 4611686018427387904; expected 0 for none"));
  EXPECT_TRUE(refused({.version = 3, .rotation = 3}, "blocks of 8; expected 0 for none, or a power of two from 16 to 128"));
  EXPECT_TRUE(refused({.version = 3, .rotation = 8, .k = 256}, "blocks of 256; expected"));
  EXPECT_TRUE(refused({.version = 3, .rotation = 4}, "that divides the number of inputs, 40"));
  Layout layout = layout_of(3, 48, 4, 32, Mapping::symmetric, false);
  EXPECT_TRUE(set_rotation(16, &layout).ok());
  EXPECT_EQ(layout.rotated_inputs(), 16);
  EXPECT_TRUE(set_rotation(0, &layout).ok());
  EXPECT_EQ(layout.rotated_inputs(), 0);
  for (const int64_t inputs : {-16, 1, 8, 24, 32, 256}) EXPECT_FALSE(set_rotation(inputs, &layout).ok()) << inputs;
}

TEST(Format, LayoutParametersAreChecked) {
  Layout layout;
  const auto make = [&](int64_t n, int64_t k, int bits, int64_t group_size) {
    return make_layout(n, k, bits, group_size, Mapping::affine, false, &layout).ok();
  };
  EXPECT_TRUE(make(1, 1, 1, 0));
  EXPECT_TRUE(make(kMaxDimension, kMaxDimension, 8, 16));
  EXPECT_GT(layout.total_bytes, int64_t{1} << 62);
  EXPECT_TRUE(make(1, kMaxDimension, 8, 0));
  EXPECT_TRUE(make(1, kMaxDimension, 8, kMaxDimension));
  EXPECT_FALSE(make(kMaxDimension + 1, 1, 8, 16));
  EXPECT_FALSE(make(1, kMaxDimension + 1, 8, 16));
  EXPECT_FALSE(make(1, 1, 8, kMaxDimension + 16));
  EXPECT_FALSE(make(1, 1, 8, -16));
  EXPECT_FALSE(make(1, 1, 8, 24));
  EXPECT_FALSE(make(1, 1, 0, 16));
  EXPECT_FALSE(make(1, 1, 9, 16));
  EXPECT_FALSE(make(1, 1, -1, 16));
  const int8_t levels[16] = {1, 2, 3, 4};
  EXPECT_TRUE(make_layout(1, 1, 4, 16, Mapping::levels, false, &layout, levels).ok());
  EXPECT_STREQ(make_layout(1, 1, 4, 16, Mapping::levels, false, &layout).message(),
               "there are no levels; expected 16 of them");
  EXPECT_FALSE(make_layout(1, 1, 4, 16, Mapping::symmetric, false, &layout, levels).ok());
  EXPECT_FALSE(make_layout(1, 1, 5, 16, Mapping::levels, false, &layout, levels).ok());
  EXPECT_STREQ(make_layout(1, 1, 4, 16, static_cast<Mapping>(3), false, &layout).message(),
               "mapping is 3; expected symmetric (0), affine (1) or levels (2)");
}

TEST(Format, AnyAlteredByteOfThePayloadIsNoticed) {
  Random random(2);
  const Layout layout = layout_of(17, 1, 1, 0, Mapping::symmetric, false);  // two panels
  std::vector<uint8_t> bytes = packed(random_weights(layout, random));
  ASSERT_TRUE(verify_payload(bytes.data(), layout).ok());
  for (size_t at = 64; at < bytes.size(); ++at) {
    const uint8_t original = bytes[at];
    for (int flip = 1; flip < 256; ++flip) {
      bytes[at] = static_cast<uint8_t>(original ^ flip);
      const Status status = verify_payload(bytes.data(), layout);
      ASSERT_FALSE(status.ok()) << "byte " << at;
      ASSERT_NE(std::strstr(status.message(), "the header says"), nullptr);
    }
    bytes[at] = original;
  }
  std::swap_ranges(bytes.begin() + 64, bytes.begin() + 64 + layout.panel_bytes,
                   bytes.begin() + 64 + layout.panel_bytes);
  EXPECT_FALSE(verify_payload(bytes.data(), layout).ok()) << "two panels changed places";
}

// Checksums of whole packed matrices with headers. They change only with the format's version.
TEST(Format, GoldenMatrices) {
  constexpr uint64_t kSymmetric[8] = {0x38f5acdcd728c4b4u, 0x440eaa3d6e459f67u, 0x1b72945036e95bf7u,
                                      0x1bf0a5de9504e3eau, 0xc7348c2eac00716du, 0x173b72df364b2964u,
                                      0x574c4e572cd3dd8au, 0x84cff0612beeb866u};
  constexpr uint64_t kAffine[8] = {0xf7f9bd295a06a6b2u, 0x00e56a4268122abau, 0x802b6f0f85cadd9bu, 0x26133e8ac33dee39u,
                                   0xa44190643b5920ecu, 0x3fd09317c9816c6bu, 0x2b9ab90e25f02f38u, 0x9a2af80c216391e5u};
  constexpr uint64_t kLevels[8] = {0, 0x1c123ae2b5c0bd33u, 0xfa1a89eadd42705eu, 0x001fcf0448179055u};  // 2 to 4 bits
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      Weights w{layout_of(18, 75, bits, 48, mapping, true), {}, {}, {}, {}};
      for (int i = 0; i < 18 * 75; ++i)
        w.codes.push_back(static_cast<uint8_t>((i * i + 7 * i) >> 2 & ((1 << bits) - 1)));
      for (int i = 0; i < 18 * 2; ++i) {  // rows with and without a row scale of 1
        w.scales.push_back(i % 4 < 2 ? 0.0078125f * static_cast<float>(i + 1) : 0.1f / static_cast<float>(i + 1));
        if (mapping == Mapping::affine) w.mins.push_back((i % 4 < 2 ? -0.03125f : -0.03f) * static_cast<float>(i % 7));
      }
      for (int i = 0; i < 18; ++i) w.bias.push_back(0.25f * static_cast<float>(i - 9));
      const std::vector<uint8_t> bytes = packed(w);
      const uint64_t expected = (mapping == Mapping::affine   ? kAffine
                                 : mapping == Mapping::levels ? kLevels
                                                              : kSymmetric)[bits - 1];
      const uint64_t found = checksum_of(bytes.data(), static_cast<int64_t>(bytes.size()));
      EXPECT_EQ(found, expected) << "bits " << bits << " " << name_of(mapping) << std::hex << " 0x" << found;
    }
  }
}

}  // namespace
}  // namespace lowbit::test
