// recurrence_avx2. Formulas: ../recurrence.h; bodies: recurrence_impl.h.

#include "../vector/avx2.h"
#include "recurrence_impl.h"

namespace lowbit {
namespace {

constexpr RecurrenceKernel kKernels[] = {{"recurrence_avx2", kAvx2, linear_attention<Vector>, short_conv<Vector>}};

}  // namespace

extern const Table<RecurrenceKernel> kRecurrenceAvx2;
const Table<RecurrenceKernel> kRecurrenceAvx2{kKernels, 1};

}  // namespace lowbit
