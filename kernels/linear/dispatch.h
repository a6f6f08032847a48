// From a call's layout to the template of a kernel: which mapping the weights have, and whether groups may end in the middle
// of a block.
#pragma once

#include <type_traits>

#include "../format.h"

namespace lowbit {
namespace {

// Calls run(bits, affine, halves), whose arguments are constants: integral_constant of the width or by_table(width), and
// bool_constant twice. `halves`: the group size is no multiple of 32.
template <int Bits, class Run>
LOWBIT_INLINE inline void dispatch(const Layout& layout, Run run) {
  const auto with_halves = [&](auto bits, auto affine) LOWBIT_INLINE {
    layout.group_inputs() % kBlockInputs != 0 ? run(bits, affine, std::true_type()) : run(bits, affine, std::false_type());
  };
  if constexpr (can_have_levels(Bits)) {
    if (layout.mapping == Mapping::levels) {
      return with_halves(std::integral_constant<int, by_table(Bits)>(), std::false_type());
    }
  }
  constexpr std::integral_constant<int, Bits> kBits;
  layout.mapping == Mapping::affine ? with_halves(kBits, std::true_type()) : with_halves(kBits, std::false_type());
}

}  // namespace
}  // namespace lowbit
