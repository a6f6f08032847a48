// Converts a call's layout to the constants of a kernel template: the mapping of the weights, and whether groups may end in the
// middle of a block.
#pragma once

#include <type_traits>

#include "../format.h"

namespace lowbit {
namespace {

// Calls run(bits, affine, halves): with_mapping()'s constants, and whether the group size is not a multiple of 32.
template <int Bits, class Run>
LOWBIT_INLINE inline void dispatch(const Layout& layout, Run run) {
  const auto with_halves = [&](auto bits, auto affine) LOWBIT_INLINE {
    layout.group_inputs() % kBlockInputs != 0 ? run(bits, affine, std::true_type()) : run(bits, affine, std::false_type());
  };
  with_mapping<Bits>(layout.mapping, with_halves);
}

}  // namespace
}  // namespace lowbit
