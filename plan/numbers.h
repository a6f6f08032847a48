// The small operators of plans that are not in ops/operators.h. They check their tensors, too.
#pragma once

#include "../kernels/export.h"
#include "../kernels/status.h"
#include "../ops/parallel.h"
#include "../ops/tensor_view.h"
#include "plan.h"

namespace lowbit {

LOWBIT_API Status copy(const TensorView& x, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status compute(const TensorView* x, int64_t count, const Instruction* instructions, int64_t instruction_count,
                          const double* constants, int64_t constant_count, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status float_linear(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& out,
                               const Parallel& parallel);
LOWBIT_API Status sum(const TensorView& x, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status softmax(const TensorView& x, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status top(const TensorView& x, const TensorView& values, const TensorView& indices, const Parallel& parallel);
LOWBIT_API Status gather(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status take(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status scatter(const TensorView& indices, double value, const TensorView& out, const Parallel& parallel);
LOWBIT_API Status count_up(double start, double step, const TensorView& out);
// out [texts, width] from the rows x [1, rows, width] of each text: `ranges` [texts, 2] has their begin and end. The mode is a
// Pooling.
LOWBIT_API Status pool(const TensorView& x, const TensorView& ranges, int64_t mode, const TensorView& out,
                       const Parallel& parallel);

}  // namespace lowbit
