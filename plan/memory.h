// The memory of a plan's buffers and the views of its operands, for the sizes of a call.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "../ops/aligned_memory.h"
#include "../ops/first_weights.h"
#include "plan.h"

namespace lowbit {

// The views of all operands, step after step, for calls of the same sizes.
struct PreparedViews {
  int64_t rows = 0, kept = 0;
  uint64_t used = 0;  // by which call
  std::vector<TensorView> views;
  std::vector<Memory> memory;  // for each buffer; inputs and outputs have the bytes that views need
  struct Moving {
    size_t view, buffer;
    int64_t offset;  // in bytes
  };
  std::vector<Moving> moving;  // the views of inputs and outputs
  // For each linear operator, where each helper begins to read the next one's weights; empty before the first call.
  std::vector<FirstWeights> next_weights;
};

class PlanMemory {
 public:
  // The plan must outlive it.
  explicit PlanMemory(const Plan& plan);

  // Checks the number of operands, and that no temporary is read before it is written. Must be called first.
  Status check();
  void bind(size_t buffer, Memory memory);
  // The views for a call, whose inputs and outputs are in place. They stay valid until the next call.
  Status prepare(const PlanCall& call, PreparedViews** views);

 private:
  // When the value of a temporary is first written and last used, in steps.
  struct Life {
    int64_t first = -1, last = -1;
  };

  Status place(const PlanCall& call, PreparedViews* to);
  Status view(const PlanCall& call, const Operand& operand, size_t step, PreparedViews* to) const;

  const Plan& plan_;
  std::vector<Memory> weights_;               // for each buffer
  std::vector<Life> lives_;                   // for each buffer
  std::unique_ptr<void, FreeAligned> arena_;  // holds temporaries
  int64_t arena_bytes_ = 0;
  std::array<PreparedViews, 4> prepared_;
  uint64_t calls_ = 0;
};

}  // namespace lowbit
