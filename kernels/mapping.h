// The mappings of codes to weights (format.h has their formulas): names, stored data, and template arguments for kernels.
// Except for the list of values in lowbit_ukernel.h, no other file of kernels/ and ops/ names a single mapping
// (tests/python/project/test_structure.py).
#pragma once

#include <cstdint>
#include <type_traits>

#include "bits/codec.h"
#include "lowbit_ukernel.h"

namespace lowbit {

inline constexpr Mapping kMappings[] = {Mapping::symmetric, Mapping::affine, Mapping::levels};

constexpr const char* name_of(Mapping mapping) {
  return mapping == Mapping::affine ? "affine" : mapping == Mapping::levels ? "levels" : "symmetric";
}

// Whether each group has a min in addition to its scale.
constexpr bool has_mins(Mapping mapping) { return mapping == Mapping::affine; }

// Whether the header has a table of levels.
constexpr bool has_table(Mapping mapping) { return mapping == Mapping::levels; }

constexpr Mapping mapping_with(bool mins, bool table) {
  return table ? Mapping::levels : mins ? Mapping::affine : Mapping::symmetric;
}

// Sets of mappings in the kernel table.
constexpr uint8_t bit_of(Mapping mapping) { return static_cast<uint8_t>(1u << static_cast<unsigned>(mapping)); }
inline constexpr uint8_t kPlainMappings = bit_of(Mapping::symmetric) | bit_of(Mapping::affine);
inline constexpr uint8_t kAllMappings = kPlainMappings | bit_of(Mapping::levels);

// Bytes of a group of a panel: float16 scales, then float16 mins.
constexpr int group_bytes(bool mins) { return kPanelRows * (mins ? 4 : 2); }

namespace {

// Calls run(bits, affine) with constants from which a kernel chooses its template: an integral_constant of the width, or of
// by_table(width), and a bool_constant.
template <int Bits, class Run>
LOWBIT_INLINE inline void with_mapping(Mapping mapping, Run run) {
  if constexpr (can_have_levels(Bits)) {
    if (mapping == Mapping::levels) return run(std::integral_constant<int, by_table(Bits)>(), std::false_type());
  }
  constexpr std::integral_constant<int, Bits> kBits;
  mapping == Mapping::affine ? run(kBits, std::true_type()) : run(kBits, std::false_type());
}

}  // namespace
}  // namespace lowbit
