// attention_neon: 16 floats are four registers. Formula: ukernel.h; body: attention_impl.h.

#include "vector_neon.h"

#include "attention_impl.h"
#include "elementwise_impl.h"
#include "recurrence_impl.h"
#include "write_cache.h"

namespace lowbit {
namespace {

constexpr AttentionKernel kRows[] = {{"attention_neon", kNeon, run<Vector>, write_cache<Vector>, join_spans<Vector>}};

constexpr RecurrenceKernel kRecurrenceRows[] = {{"recurrence_neon", kNeon, linear_attention<Vector>, short_conv<Vector>}};

constexpr ElementwiseKernel kElementwiseRows[] = {
    {"elementwise_neon", kNeon, activate<Vector>, rms_norm<Vector>, rotate_inputs<Vector>, residual<Vector>,
     add_planes<Vector>}};

}  // namespace

extern const Table<AttentionKernel> kAttentionNeon;
const Table<AttentionKernel> kAttentionNeon{kRows, 1};
extern const Table<RecurrenceKernel> kRecurrenceNeon;
const Table<RecurrenceKernel> kRecurrenceNeon{kRecurrenceRows, 1};
extern const Table<ElementwiseKernel> kElementwiseNeon;
const Table<ElementwiseKernel> kElementwiseNeon{kElementwiseRows, 1};

}  // namespace lowbit
