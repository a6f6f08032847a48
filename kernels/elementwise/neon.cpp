// elementwise_neon. Formulas: ../elementwise.h; bodies: elementwise_impl.h.

#include "../vector/neon.h"
#include "elementwise_impl.h"

namespace lowbit {
namespace {

constexpr ElementwiseKernel kKernels[] = {
    {"elementwise_neon", kNeon, activate<Vector>, rms_norm<Vector>, layer_norm<Vector>,
     rotary<Vector>, rotate_inputs<Vector>, residual<Vector>, add_planes<Vector>,
     float_products<Vector>}};

}  // namespace

extern const Table<ElementwiseKernel> kElementwiseNeon;
const Table<ElementwiseKernel> kElementwiseNeon{kKernels, 1};

}  // namespace lowbit
