// elementwise_avx512vnni. Formulas: ../elementwise.h; bodies: elementwise_impl.h.

#include "../vector/avx512.h"
#include "elementwise_impl.h"

namespace lowbit {
namespace {

constexpr ElementwiseKernel kKernels[] = {
    {"elementwise_avx512vnni", kAvx512Vnni, activate<Vector>, rms_norm<Vector>, layer_norm<Vector>,
     rotary<Vector>, rotate_inputs<Vector>, residual<Vector>, add_planes<Vector>,
     float_products<Vector>}};

}  // namespace

extern const Table<ElementwiseKernel> kElementwiseAvx512Vnni;
const Table<ElementwiseKernel> kElementwiseAvx512Vnni{kKernels, 1};

}  // namespace lowbit
