// recurrence_avx512vnni. Formulas: ../recurrence.h; bodies: recurrence_impl.h.

#include "../vector/avx512.h"
#include "recurrence_impl.h"

namespace lowbit {
namespace {

constexpr RecurrenceKernel kKernels[] = {{"recurrence_avx512vnni", kAvx512Vnni, linear_attention<Vector>, short_conv<Vector>}};

}  // namespace

extern const Table<RecurrenceKernel> kRecurrenceAvx512Vnni;
const Table<RecurrenceKernel> kRecurrenceAvx512Vnni{kKernels, 1};

}  // namespace lowbit
