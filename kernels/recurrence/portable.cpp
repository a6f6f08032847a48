// recurrence_portable. Formulas: ../recurrence.h; bodies: recurrence_impl.h.

#include "../vector/portable.h"
#include "recurrence_impl.h"

namespace lowbit {
namespace {

constexpr RecurrenceKernel kKernels[] = {{"recurrence_portable", kPortable, linear_attention<Vector>, short_conv<Vector>}};

}  // namespace

extern const Table<RecurrenceKernel> kRecurrencePortable;
const Table<RecurrenceKernel> kRecurrencePortable{kKernels, 1};

}  // namespace lowbit
