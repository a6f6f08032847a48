// The mappings of codes to weights (format.h has their formulas): what each one is called and stores, and which template of a
// kernel computes it. Apart from the list of their values in lowbit_ukernel.h, no other file of kernels/ and ops/ names a
// single mapping: tests/python/project/test_structure.py.
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

// Whether each group has a min beside its scale.
constexpr bool has_mins(Mapping mapping) { return mapping == Mapping::affine; }

// Whether the header has a table of levels.
constexpr bool has_table(Mapping mapping) { return mapping == Mapping::levels; }

constexpr Mapping mapping_with(bool mins, bool table) {
  return table ? Mapping::levels : mins ? Mapping::affine : Mapping::symmetric;
}

// Sets of mappings, as rows of the kernel table have them.
constexpr uint8_t bit_of(Mapping mapping) { return static_cast<uint8_t>(1u << static_cast<unsigned>(mapping)); }
inline constexpr uint8_t kPlainMappings = bit_of(Mapping::symmetric) | bit_of(Mapping::affine);
inline constexpr uint8_t kAllMappings = kPlainMappings | bit_of(Mapping::levels);

// Of a group of a panel: float16 scales, then float16 mins.
constexpr int group_bytes(bool mins) { return kPanelRows * (mins ? 4 : 2); }

namespace {

// Calls run(bits, affine), whose arguments are constants: an integral_constant of the width, or of by_table(width), and a
// bool_constant. By them a kernel chooses its template.
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
