// The bit layout of a block is a bijection, preserves every code, and is the layout of format v1.

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <utility>

#include "../../kernels/bits/codec.h"
#include "support/matrix.h"

namespace lowbit::test {
namespace {

// Writes and reads the eight codes of one position with the library's templates.
template <int Bits>
struct Position {
  uint8_t packed[Bits * kLineBytes] = {};

  void write(const uint8_t (&codes)[kBlockLines], int at) {
    [&]<int... J>(std::integer_sequence<int, J...>) {
      (write_code<Bits, J>(packed + at, codes[J]), ...);
    }(std::make_integer_sequence<int, kBlockLines>());
  }
  void read(uint8_t (&codes)[kBlockLines], int at) const {
    [&]<int... J>(std::integer_sequence<int, J...>) {
      ((codes[J] = read_code<Bits, J>(packed + at)), ...);
    }(std::make_integer_sequence<int, kBlockLines>());
  }
};

template <class Visit>
void for_each_width(const Visit& visit) {
  [&]<int... B>(std::integer_sequence<int, B...>) {
    (visit(std::integral_constant<int, B + 1>()), ...);
  }(std::make_integer_sequence<int, 8>());
}

TEST(Codec, PlacementIsABijectionOfBits) {
  for (int bits = 1; bits <= 8; ++bits) {
    std::set<int> code_bits, packed_bits;
    for (int j = 0; j < kBlockLines; ++j) {
      const CodePlacement where = placement(bits, j);
      for (int i = 0; i < where.count; ++i) {
        const BitRun run = where.run[i];
        for (int bit = 0; bit < run.length; ++bit) {
          ASSERT_LT(run.line, bits);
          ASSERT_LT(run.line_bit + bit, 8);
          ASSERT_LT(run.code_bit + bit, bits);
          EXPECT_TRUE(packed_bits.insert(run.line * 8 + run.line_bit + bit).second) << bits << " bits, line " << j;
          EXPECT_TRUE(code_bits.insert(j * 8 + run.code_bit + bit).second) << bits << " bits, line " << j;
        }
      }
    }
    EXPECT_EQ(packed_bits.size(), static_cast<size_t>(8 * bits));
    EXPECT_EQ(code_bits.size(), static_cast<size_t>(8 * bits));
  }
}

TEST(Codec, PlacementIsThatOfFormat1) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (int j = 0; j < kBlockLines; ++j) {
      std::string found(static_cast<size_t>(2 * bits), '?');
      const CodePlacement where = placement(bits, j);
      for (int i = 0; i < where.count; ++i) {
        const BitRun run = where.run[i];
        for (int bit = 0; bit < run.length; ++bit) {
          found[static_cast<size_t>(2 * (run.code_bit + bit))] = static_cast<char>('0' + run.line);
          found[static_cast<size_t>(2 * (run.code_bit + bit) + 1)] = static_cast<char>('0' + run.line_bit + bit);
        }
      }
      EXPECT_EQ(found, kBitMaps[bits].of_line[j]) << bits << " bits, line " << j;
    }
  }
}

TEST(Codec, EveryCodeSurvivesAmongRandomOnes) {
  Random random(1);
  for_each_width([&](auto width) {
    constexpr int kBits = width;
    for (int j = 0; j < kBlockLines; ++j) {
      for (int code = 0; code < 1 << kBits; ++code) {
        uint8_t codes[kBlockLines], read[kBlockLines];
        for (uint8_t& other : codes) other = static_cast<uint8_t>(random.below(1 << kBits));
        codes[j] = static_cast<uint8_t>(code);
        const int at = static_cast<int>(random.below(kLineBytes));
        Position<kBits> position;
        position.write(codes, at);
        position.read(read, at);
        ASSERT_EQ(std::memcmp(codes, read, sizeof codes), 0) << kBits << " bits, line " << j << ", code " << code;
      }
    }
  });
}

// One position: its eight codes and its byte in each packed line. Fixed by format v1.
struct Golden {
  int bits;
  uint8_t codes[kBlockLines];
  uint8_t packed[8];
};
constexpr Golden kGolden[] = {
    {1, {0, 1, 0, 1, 0, 1, 0, 1}, {0xaa}},
    {1, {1, 0, 1, 0, 1, 0, 1, 0}, {0x55}},
    {1, {0, 0, 0, 0, 0, 0, 0, 1}, {0x80}},
    {1, {0, 0, 0, 1, 0, 0, 1, 0}, {0x48}},
    {2, {0, 1, 2, 3, 0, 1, 2, 3}, {0xe4, 0xe4}},
    {2, {3, 0, 1, 2, 3, 0, 1, 2}, {0x93, 0x93}},
    {2, {0, 0, 0, 0, 0, 0, 0, 3}, {0x00, 0xc0}},
    {2, {0, 0, 0, 3, 0, 0, 3, 0}, {0xc0, 0x30}},
    {3, {0, 1, 2, 3, 4, 5, 6, 7}, {0xd8, 0x61, 0xea}},
    {3, {3, 0, 5, 2, 7, 4, 1, 6}, {0x13, 0xb8, 0xe5}},
    {3, {0, 0, 0, 0, 0, 0, 0, 7}, {0x00, 0x40, 0xc0}},
    {3, {0, 0, 0, 7, 0, 0, 7, 0}, {0xf8, 0x80, 0x00}},
    {4, {0, 1, 2, 3, 4, 5, 6, 7}, {0x40, 0x51, 0x62, 0x73}},
    {4, {11, 0, 5, 10, 15, 4, 9, 14}, {0xfb, 0x40, 0x95, 0xea}},
    {4, {0, 0, 0, 0, 0, 0, 0, 15}, {0x00, 0x00, 0x00, 0xf0}},
    {4, {0, 0, 0, 15, 0, 0, 15, 0}, {0x00, 0x00, 0xf0, 0x0f}},
    {5, {0, 1, 2, 3, 4, 5, 6, 7}, {0x20, 0x21, 0x22, 0x23, 0xe4}},
    {5, {11, 16, 21, 26, 31, 4, 9, 14}, {0xeb, 0x30, 0x55, 0x7a, 0x93}},
    {5, {0, 0, 0, 0, 0, 0, 0, 31}, {0x00, 0x00, 0x00, 0xe0, 0xc0}},
    {5, {0, 0, 0, 31, 0, 0, 31, 0}, {0x00, 0x00, 0xe0, 0x1f, 0x30}},
    {6, {0, 1, 2, 3, 4, 5, 6, 7}, {0x00, 0x01, 0xc2, 0x04, 0x45, 0xc6}},
    {6, {11, 48, 21, 58, 31, 4, 41, 14}, {0xcb, 0xb0, 0x95, 0x1f, 0xc4, 0xa9}},
    {6, {0, 0, 0, 0, 0, 0, 0, 63}, {0x00, 0x00, 0x00, 0xc0, 0xc0, 0xc0}},
    {6, {0, 0, 0, 63, 0, 0, 63, 0}, {0xc0, 0xc0, 0xc0, 0x00, 0x00, 0x3f}},
    {7, {0, 1, 2, 3, 4, 5, 6, 7}, {0x00, 0x01, 0x02, 0x03, 0x84, 0x85, 0x86}},
    {7, {11, 48, 85, 122, 31, 68, 105, 14}, {0x0b, 0x30, 0x55, 0xfa, 0x9f, 0xc4, 0x69}},
    {7, {0, 0, 0, 0, 0, 0, 0, 127}, {0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80}},
    {7, {0, 0, 0, 127, 0, 0, 127, 0}, {0x00, 0x00, 0x00, 0x7f, 0x00, 0x00, 0x7f}},
    {8, {0, 1, 2, 3, 4, 5, 6, 7}, {0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87}},
    {8, {11, 48, 85, 122, 159, 196, 233, 14}, {0x8b, 0xb0, 0xd5, 0xfa, 0x1f, 0x44, 0x69, 0x8e}},
    {8, {0, 0, 0, 0, 0, 0, 0, 255}, {0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x7f}},
    {8, {0, 0, 0, 255, 0, 0, 255, 0}, {0x80, 0x80, 0x80, 0x7f, 0x80, 0x80, 0x7f, 0x80}},
};

TEST(Codec, GoldenBytes) {
  int examples = 0;
  for_each_width([&](auto width) {
    constexpr int kBits = width;
    for (const Golden& golden : kGolden) {
      if (golden.bits != kBits) continue;
      ++examples;
      for (const int at : {0, 29, 63}) {
        Position<kBits> position;
        position.write(golden.codes, at);
        for (int byte = 0; byte < kBits * kLineBytes; ++byte) {
          const int expected = byte % kLineBytes == at ? golden.packed[byte / kLineBytes] : 0;
          EXPECT_EQ(position.packed[byte], expected) << kBits << " bits, byte " << byte;
        }
      }
    }
  });
  EXPECT_EQ(examples, 32);
}

TEST(Codec, Levels) {
  EXPECT_EQ(level_factor(1) * 0 - level_offset(1), -1);
  EXPECT_EQ(level_factor(1) * 1 - level_offset(1), 1);
  for (int bits = 2; bits <= 8; ++bits) {
    EXPECT_EQ(level_factor(bits), 1);
    EXPECT_EQ(level_offset(bits), 1 << (bits - 1));
  }
}

}  // namespace
}  // namespace lowbit::test
