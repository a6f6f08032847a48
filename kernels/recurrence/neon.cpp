// recurrence_neon. Formulas: ../recurrence.h; bodies: recurrence_impl.h.

#include "../vector/neon.h"
#include "recurrence_impl.h"

namespace lowbit {
namespace {

constexpr RecurrenceKernel kKernels[] = {{"recurrence_neon", kNeon, linear_attention<Vector>, short_conv<Vector>}};

}  // namespace

extern const Table<RecurrenceKernel> kRecurrenceNeon;
const Table<RecurrenceKernel> kRecurrenceNeon{kKernels, 1};

}  // namespace lowbit
