#include "packed_damage.h"

#include <algorithm>
#include <cstring>

#include "../../../kernels/format.h"
#include "matrix.h"

namespace lowbit::test {
namespace {

constexpr int64_t kGroups[] = {0, 16, 32, 48, 64, 80, 272};
// Offsets and sizes of a header's fields (docs/format.md).
constexpr struct {
  int64_t at, bytes;
} kFields[] = {{0, 8},  {8, 2},  {10, 1}, {11, 1}, {12, 1}, {13, 1},
               {14, 2}, {16, 8}, {24, 8}, {32, 4}, {36, 4}, {40, 8}};
constexpr int64_t kPayloadChecksum = 48, kHeaderChecksum = 56;
constexpr uint16_t kHalves[] = {0, 0x8000, 1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe01};

void seal_header(std::vector<uint8_t>& bytes) {
  if (bytes.size() < 64) return;
  std::vector<uint8_t> covered(bytes.begin(), bytes.begin() + kHeaderChecksum);
  if (bytes[8] == kLevelsVersion && bytes.size() >= 128) {
    covered.insert(covered.end(), bytes.begin() + 64, bytes.begin() + 128);
  }
  const uint64_t sum = checksum_of(covered.data(), static_cast<int64_t>(covered.size()));
  std::memcpy(bytes.data() + kHeaderChecksum, &sum, sizeof sum);
}

void damage_header(std::vector<uint8_t>& bytes, Random& random) {
  if (bytes.size() < 128 || random.below(4) == 0) {
    if (bytes.empty()) return;
    const int64_t at = random.below(std::min<int64_t>(128, static_cast<int64_t>(bytes.size())));
    bytes[static_cast<size_t>(at)] ^= static_cast<uint8_t>(1 << random.below(8));
    return;
  }
  const auto field = any_of(kFields, random);
  uint64_t value = 0;
  std::memcpy(&value, bytes.data() + field.at, static_cast<size_t>(field.bytes));
  switch (random.below(3)) {
    case 0: value += static_cast<uint64_t>(any_in(random, -17, 17)); break;
    case 1: value = any_of(kNumbers, random); break;
    default: value = random.next(); break;
  }
  std::memcpy(bytes.data() + field.at, &value, static_cast<size_t>(field.bytes));
}

void damage_payload(std::vector<uint8_t>& bytes, Random& random) {
  if (bytes.size() < 72) return;
  const int64_t words = static_cast<int64_t>(bytes.size() - 64) / 4;
  uint8_t* const at = bytes.data() + 64 + 4 * random.below(words);
  switch (random.below(3)) {
    case 0:
      for (uint8_t* byte = at; byte < std::min(at + any_in(random, 1, 64), bytes.data() + bytes.size()); ++byte) {
        *byte = static_cast<uint8_t>(random.next());
      }
      break;
    case 1: {
      const uint16_t half = any_of(kHalves, random);
      std::memcpy(at + 2 * random.below(2), &half, sizeof half);
      break;
    }
    default: {
      const uint32_t number = any_of(kFloats, random);
      std::memcpy(at, &number, sizeof number);
    }
  }
}

}  // namespace

std::vector<uint8_t> random_matrix(bool small, Random& random) {
  const int bits = static_cast<int>(any_in(random, 1, 8));
  const std::vector<Mapping> mappings = mappings_of_width(bits);
  const Mapping mapping = mappings[static_cast<size_t>(random.below(static_cast<int64_t>(mappings.size())))];
  int64_t n = any_in(random, 1, 18), k = any_in(random, 1, 40);
  if (!small) {
    n = random.below(4) == 0 ? any_in(random, 33, 70) : any_in(random, 1, 32);
    k = random.below(4) == 0 ? any_in(random, 97, 400) : any_in(random, 1, 96);
  }
  return packed(random_weights(layout_of(n, k, bits, any_of(kGroups, random), mapping, random.below(2) == 0), random));
}

void seal_again(std::vector<uint8_t>& bytes, Random& random) {
  if (random.below(4) != 0) seal_header(bytes);
  Layout layout;
  if (random.below(2) == 0 && read_header(bytes.data(), static_cast<int64_t>(bytes.size()), &layout).ok()) {
    const uint64_t folded = fold_panels(bytes.data(), layout, 0);
    std::memcpy(bytes.data() + kPayloadChecksum, &folded, sizeof folded);
    seal_header(bytes);
  }
}

std::vector<uint8_t> damaged(std::vector<uint8_t> bytes, Random& random) {
  const bool header_stays = random.below(3) != 0;  // most damaged headers are refused before a kernel runs
  for (int64_t left = any_in(random, 1, 4); left > 0; --left) {
    const int64_t what = header_stays ? 3 : random.below(8);
    if (what < 3) {
      damage_header(bytes, random);
    } else if (what < 7) {
      damage_payload(bytes, random);
    } else if (random.below(2) == 0) {
      bytes.resize(static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size()) + 1)));
    } else {
      bytes.resize(bytes.size() + static_cast<size_t>(any_in(random, 1, 200)), 0x33);
    }
  }
  seal_again(bytes, random);
  return bytes;
}

}  // namespace lowbit::test
