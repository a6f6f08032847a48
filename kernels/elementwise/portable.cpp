// elementwise_portable. Formulas: ../elementwise.h; bodies: elementwise_impl.h.

#include "../vector/portable.h"
#include "elementwise_impl.h"

namespace lowbit {
namespace {

constexpr ElementwiseKernel kKernels[] = {
    {"elementwise_portable", kPortable, activate<Vector>, rms_norm<Vector>, layer_norm<Vector>,
     rotary<Vector>, rotate_inputs<Vector>, residual<Vector>, add_planes<Vector>,
     float_products<Vector>}};

}  // namespace

extern const Table<ElementwiseKernel> kElementwisePortable;
const Table<ElementwiseKernel> kElementwisePortable{kKernels, 1};

}  // namespace lowbit
