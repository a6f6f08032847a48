// elementwise_avx2. Formulas: ../elementwise.h; bodies: elementwise_impl.h.

#include "../vector/avx2.h"
#include "elementwise_impl.h"

namespace lowbit {
namespace {

constexpr ElementwiseKernel kKernels[] = {
    {"elementwise_avx2", kAvx2, activate<Vector>, rms_norm<Vector>, layer_norm<Vector>,
     rotary<Vector>, rotate_inputs<Vector>, residual<Vector>, add_planes<Vector>,
     float_products<Vector>}};

}  // namespace

extern const Table<ElementwiseKernel> kElementwiseAvx2;
const Table<ElementwiseKernel> kElementwiseAvx2{kKernels, 1};

}  // namespace lowbit
