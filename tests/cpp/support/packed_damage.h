// Random packed matrices for fuzzing, randomly damaged, mostly so that they pass a reader's first check.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "random.h"

namespace lowbit::test {

// Numbers that may overflow, neighbors of powers of two, and zero, subnormal, largest, infinite and NaN floats.
inline constexpr uint64_t kNumbers[] = {
    0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 255, 65535, 65536, 65537, 0x7fffffffu, 0x80000000u, 0x80000001u,
    0xffffffffu, 0x100000000u, uint64_t{1} << 40, (uint64_t{1} << 61) + 1, uint64_t{1} << 62,
    (uint64_t{1} << 63) - 1, uint64_t{1} << 63, ~uint64_t{0}};
inline constexpr uint32_t kFloats[] = {0, 0x80000000u, 1, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu,
                                       0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u, 0x3f800000u};

template <class T, size_t kCount>
T any_of(const T (&values)[kCount], Random& random) {
  return values[random.below(kCount)];
}

inline int64_t any_in(Random& random, int64_t first, int64_t last) { return random.between(first, last); }

// Packed bytes of any width, mapping and group size; `small`: one or two panels and two blocks.
std::vector<uint8_t> random_matrix(bool small, Random& random);

// The same with one to four changes of header, payload or length, mostly with new checksums.
std::vector<uint8_t> damaged(std::vector<uint8_t> bytes, Random& random);

// Recomputes the checksums of most changed data, so that the later checks are reached.
void seal_again(std::vector<uint8_t>& bytes, Random& random);

}  // namespace lowbit::test
