// Random weight matrices for the tests, packed, and read by a decoder that shares no code with the library.
#pragma once

#include <cstdint>
#include <vector>

#include "../../../kernels/pack.h"
#include "random.h"

namespace lowbit::test {

// Position of each bit of a code in format v1, written by hand from the format's drawing (not computed from bits/codec.h):
// of_line[j] has two digits per code bit, lowest bit first: the packed line and the bit of its byte.
struct BitMap {
  const char* of_line[8];
};
extern const BitMap kBitMaps[9];  // by width; [0] is unused

// The unpacked matrix that pack_panels() takes.
struct Weights {
  Layout layout;
  std::vector<uint8_t> codes;  // n x k
  std::vector<float> scales;   // n x groups
  std::vector<float> mins;     // n x groups, empty when symmetric
  std::vector<float> bias;     // n, or empty
};

// `levels` mappings get the table of test_levels().
Layout layout_of(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias);

// The same with inputs rotated in blocks of this size.
Layout rotated(Layout layout, int64_t block);

// The same with activations in two int8 planes.
Layout in_planes(Layout layout);

// 2^bits levels in no order, from -127 (code 0) to 127 (the last code).
const int8_t* test_levels(int bits);

// The mappings in a set, for example in a kernel's set.
std::vector<Mapping> mappings_in(uint8_t set);
std::vector<Mapping> mappings_of_width(int bits);

// Random codes; scales of mixed sign and magnitude around `magnitude`.
Weights random_weights(const Layout& layout, Random& random, float magnitude = 0.02f);

PackArgs pack_args(const Weights& weights);
std::vector<uint8_t> packed(const Weights& weights);  // fails the test when packing does
Weights unpacked(const Layout& layout, const std::vector<uint8_t>& packed);

// The content of packed bytes, decoded independently of the library.
struct Decoded {
  int64_t n, k, groups, group_inputs;
  int bits;
  bool affine;
  std::vector<int8_t> levels;                   // of mapping levels; otherwise empty
  std::vector<uint8_t> codes;                   // n x k
  std::vector<int16_t> integers;                // n x k: factors of the scale
  std::vector<int32_t> sums, magnitudes;        // n x groups: sums of the integers and of their absolute values
  std::vector<double> scales, mins;             // n x groups, as stored: without the row scale
  std::vector<float> row_scale, row_sum, bias;  // n

  double level(int64_t row, int64_t input) const { return integers[static_cast<size_t>(row * k + input)]; }
  double weight(int64_t row, int64_t input) const;
};
Decoded decode(const uint8_t* packed, const Layout& layout);

// Overwrites the codes of rows and inputs beyond n and k, which may have any value.
void scramble_padding(uint8_t* packed, const Layout& layout, Random& random);

// The number with these bits, computed from its fields; for 16-bit floats with 5 exponent bits.
double value_of_half(uint16_t half);

// The checksum of the format, restated: FNV-1a over 64-bit words in eight lanes (docs/format.md).
uint64_t checksum_of(const uint8_t* data, int64_t size);

}  // namespace lowbit::test
