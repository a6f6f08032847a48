// The small operators of plans that are not in ops/operators.h. They check their tensors, too.
#pragma once

#include "../kernels/status.h"
#include "../ops/parallel.h"
#include "../ops/tensor_view.h"
#include "plan.h"

namespace lowbit {

Status copy(const TensorView& x, const TensorView& out, const Parallel& parallel);
Status compute(const TensorView* x, int64_t count, const Instruction* instructions, int64_t instruction_count,
               const double* constants, int64_t constant_count, const TensorView& out, const Parallel& parallel);
Status float_linear(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& out,
                    const Parallel& parallel);
Status sum(const TensorView& x, const TensorView& out, const Parallel& parallel);
Status softmax(const TensorView& x, const TensorView& out, const Parallel& parallel);
Status top(const TensorView& x, const TensorView& values, const TensorView& indices, const Parallel& parallel);
Status gather(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel& parallel);
Status take(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel& parallel);
Status scatter(const TensorView& indices, double value, const TensorView& out, const Parallel& parallel);
Status count_up(double start, double step, const TensorView& out);

}  // namespace lowbit
