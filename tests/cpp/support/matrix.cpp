#include "matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace lowbit::test {

const BitMap kBitMaps[9] = {
    {},
    {{"00", "01", "02", "03", "04", "05", "06", "07"}},
    {{"0001", "0203", "0405", "0607", "1011", "1213", "1415", "1617"}},
    {{"000102", "101112", "202122", "030405", "131415", "232425", "170607", "162627"}},
    {{"00010203", "10111213", "20212223", "30313233", "04050607", "14151617", "24252627", "34353637"}},
    {{"0001020304", "1011121314", "2021222324", "3031323334", "4041050607", "4243151617", "4445252627", "4647353637"}},
    {{"000102030405", "101112131415", "202122232425", "262716170607", "303132333435", "404142434445", "505152535455",
      "565746473637"}},
    {{"00010203040506", "10111213141516", "20212223242526", "30313233343536", "40414243444546", "50515253545556",
      "60616263646566", "67574737271707"}},
    {{"0001020304050607", "1011121314151617", "2021222324252627", "3031323334353637", "4041424344454647",
      "5051525354555657", "6061626364656667", "7071727374757677"}},
};

namespace {

// Byte offsets in a panel of format v1, computed by walking through it: the blocks, each followed by the scales of the groups
// that end in it; then the head; padded to 64 bytes.
struct Panel {
  std::vector<int64_t> block, scales;  // of each block and of each group
  int64_t group_inputs, head, size, first;

  explicit Panel(const Layout& l)
      : group_inputs(l.group_size == 0 ? l.k : l.group_size), first(l.mapping == Mapping::levels ? 128 : 64) {
    int64_t at = 0;
    for (int64_t first = 0; first < l.k; first += 32) {
      block.push_back(at);
      at += l.bits * 64;
      const int64_t last = first + 31 < l.k ? first + 31 : l.k - 1;
      for (int64_t i = first; i <= last; ++i) {
        if ((i + 1) % group_inputs != 0 && i != l.k - 1) continue;
        scales.push_back(at);
        at += l.mapping == Mapping::affine ? 64 : 32;
      }
    }
    head = at;
    size = (at + 192 + 63) / 64 * 64;
  }
  int64_t of_row(int64_t row) const { return first + row / 16 * size; }
};

// Calls visit(byte, bit, code_bit) for every bit of the code of a row and an input.
template <class Byte, class Visit>
void for_each_bit(Byte* packed, const Panel& panel, int bits, int64_t row, int64_t input, const Visit& visit) {
  Byte* const block = packed + panel.of_row(row) + panel.block[static_cast<size_t>(input / 32)];
  const int64_t position = row % 16 * 4 + input % 4;
  const char* map = kBitMaps[bits].of_line[input % 32 / 4];
  for (int bit = 0; bit < bits; ++bit) visit(block[(map[2 * bit] - '0') * 64 + position], map[2 * bit + 1] - '0', bit);
}

template <class T>
T read_at(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

double value_of_half(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double magnitude = exponent == 31  ? (mantissa ? std::nan("") : HUGE_VAL)
                           : exponent == 0 ? std::ldexp(mantissa, -24)
                                           : std::ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

Layout layout_of(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias) {
  Layout layout{};
  const Status status = make_layout(n, k, bits, group_size, mapping, has_bias, &layout,
                                    mapping == Mapping::levels ? test_levels(bits) : nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return layout;
}

Layout rotated(Layout layout, int64_t block) {
  const Status status = set_rotation(block, &layout);
  EXPECT_TRUE(status.ok()) << status.message();
  return layout;
}

Layout in_planes(Layout layout) {
  const Status status = set_activation_bits(16, &layout);
  EXPECT_TRUE(status.ok()) << status.message();
  return layout;
}

const int8_t* test_levels(int bits) {
  static constexpr int8_t kLevels[3][16] = {
      {-127, 90, -1, 127},
      {-127, 0, 64, -126, 1, -77, 33, 127},
      {-127, -104, 25, -65, 0, 126, -35, 1, -126, -10, 13, 64, -64, 89, 53, 127},
  };
  return kLevels[bits - 2];
}

std::vector<Mapping> mappings_in(uint8_t set) {
  std::vector<Mapping> mappings;
  for (const Mapping mapping : kMappings) {
    if ((set & bit_of(mapping)) != 0) mappings.push_back(mapping);
  }
  return mappings;
}

std::vector<Mapping> mappings_of_width(int bits) {
  return mappings_in(bits >= 2 && bits <= 4 ? kAllMappings : kPlainMappings);
}

Weights random_weights(const Layout& layout, Random& random, float magnitude) {
  Weights w{layout, {}, {}, {}, {}};
  w.codes.resize(static_cast<size_t>(layout.n * layout.k));
  for (uint8_t& code : w.codes) code = static_cast<uint8_t>(random.below(int64_t{1} << layout.bits));
  const auto scale = [&] {
    const float value = magnitude * random.between(0.05f, 1.0f);
    return random.below(8) == 0 ? -value : random.below(16) == 0 ? value * 0x1p-9f : value;
  };
  w.scales.resize(static_cast<size_t>(layout.n * layout.groups));
  for (float& s : w.scales) s = scale();
  if (layout.mapping == Mapping::affine) {
    for (size_t i = 0; i < w.scales.size(); ++i)
      w.mins.push_back(-scale() * static_cast<float>(1 << (layout.bits - 1)));
  }
  if (layout.has_bias) {
    for (int64_t i = 0; i < layout.n; ++i) w.bias.push_back(random.normal());
  }
  return w;
}

PackArgs pack_args(const Weights& w) {
  return {w.codes.data(), w.scales.data(), w.layout.mapping == Mapping::affine ? w.mins.data() : nullptr,
          w.layout.has_bias ? w.bias.data() : nullptr};
}

std::vector<uint8_t> packed(const Weights& w) {
  std::vector<uint8_t> bytes(static_cast<size_t>(w.layout.total_bytes), 0xcd);
  std::vector<uint64_t> checksums(static_cast<size_t>(w.layout.panels));
  const Status status = pack_panels(w.layout, pack_args(w), 0, w.layout.panels, bytes.data(), checksums.data());
  EXPECT_TRUE(status.ok()) << status.message();
  seal(w.layout, checksums.data(), bytes.data());
  return bytes;
}

Weights unpacked(const Layout& layout, const std::vector<uint8_t>& packed) {
  Weights w{layout, {}, {}, {}, {}};
  w.codes.resize(static_cast<size_t>(layout.n * layout.k));
  w.scales.resize(static_cast<size_t>(layout.n * layout.groups));
  if (layout.mapping == Mapping::affine) w.mins.resize(w.scales.size());
  if (layout.has_bias) w.bias.resize(static_cast<size_t>(layout.n));
  const UnpackArgs args{w.codes.data(), w.scales.data(), w.mins.empty() ? nullptr : w.mins.data(),
                        w.bias.empty() ? nullptr : w.bias.data()};
  unpack_panels(layout, packed.data(), 0, layout.panels, args);
  return w;
}

double Decoded::weight(int64_t row, int64_t input) const {
  const size_t group = static_cast<size_t>(row * groups + input / group_inputs);
  return double{row_scale[static_cast<size_t>(row)]} *
         (scales[group] * level(row, input) + (affine ? mins[group] : 0.0));
}

Decoded decode(const uint8_t* packed, const Layout& l) {
  const Panel where(l);
  Decoded d{};
  d.n = l.n;
  d.k = l.k;
  d.bits = l.bits;
  d.affine = l.mapping == Mapping::affine;
  if (l.mapping == Mapping::levels) {
    for (int i = 0; i < 1 << l.bits; ++i) d.levels.push_back(read_at<int8_t>(packed + 64 + i));
  }
  d.group_inputs = where.group_inputs;
  d.groups = static_cast<int64_t>(where.scales.size());
  for (int64_t row = 0; row < l.n; ++row) {
    const uint8_t* panel = packed + where.of_row(row);
    const uint8_t* head = panel + where.head;
    const int64_t r = row % 16;
    d.row_scale.push_back(read_at<float>(head + 4 * r));
    d.row_sum.push_back(read_at<float>(head + 64 + 4 * r));
    d.bias.push_back(read_at<float>(head + 128 + 4 * r));
    for (const int64_t offset : where.scales) {
      d.scales.push_back(value_of_half(read_at<uint16_t>(panel + offset + 2 * r)));
      if (d.affine) d.mins.push_back(value_of_half(read_at<uint16_t>(panel + offset + 32 + 2 * r)));
    }
    for (int64_t i = 0; i < l.k; ++i) {
      unsigned code = 0;
      for_each_bit(packed, where, l.bits, row, i,
                   [&](uint8_t byte, int bit, int code_bit) { code |= (byte >> bit & 1u) << code_bit; });
      d.codes.push_back(static_cast<uint8_t>(l.bits == 8 ? code ^ 0x80 : code));
      const int value = d.codes.back();
      d.integers.push_back(static_cast<int16_t>(!d.levels.empty() ? d.levels[static_cast<size_t>(value)]
                                                : d.affine        ? value
                                                : l.bits == 1     ? 2 * value - 1
                                                                  : value - (1 << (l.bits - 1))));
      if (i % d.group_inputs == 0) {
        d.sums.push_back(0);
        d.magnitudes.push_back(0);
      }
      d.sums.back() += d.integers.back();
      d.magnitudes.back() += std::abs(d.integers.back());
    }
  }
  return d;
}

void scramble_padding(uint8_t* packed, const Layout& l, Random& random) {
  const Panel where(l);
  for (int64_t row = 0; row < (l.n + 15) / 16 * 16; ++row) {
    for (int64_t i = 0; i < (l.k + 31) / 32 * 32; ++i) {
      if (row < l.n && i < l.k) continue;
      for_each_bit(packed, where, l.bits, row, i, [&](uint8_t& byte, int bit, int) {
        byte = static_cast<uint8_t>((byte & ~(1u << bit)) | static_cast<unsigned>(random.below(2)) << bit);
      });
    }
  }
}

uint64_t checksum_of(const uint8_t* data, int64_t size) {
  constexpr uint64_t kBasis = 14695981039346656037u, kPrime = 1099511628211u;
  uint64_t lanes[8];
  for (uint64_t i = 0; i < 8; ++i) lanes[i] = kBasis + i;
  for (int64_t at = 0; at < size; at += 8) {  // word w belongs to lane w mod 8; the last may be short
    uint64_t word = 0;
    for (int64_t i = 0; i < 8 && at + i < size; ++i) word |= uint64_t{data[at + i]} << (8 * i);
    uint64_t& lane = lanes[at / 8 % 8];
    lane = (lane ^ word) * kPrime;
  }
  uint64_t hash = kBasis;
  for (const uint64_t lane : lanes) hash = (hash ^ lane ^ (lane >> 32)) * kPrime;
  return hash;
}

}  // namespace lowbit::test
