// Iterates over the groups of a row in parts: in segments, or in pieces of several segments.
#pragma once

#include "format.h"

namespace lowbit {
namespace {

constexpr int64_t kSegmentHalves = kSegmentInputs / kHalfInputs;

constexpr int64_t half_blocks(const Layout& layout) { return (layout.k + kHalfInputs - 1) / kHalfInputs; }

// Some consecutive half blocks of a group.
struct GroupPart {
  int64_t begin, end;
  int64_t index, group;  // numbers of the part and of its group
  bool first, last;      // whether the part is the first, the last of its group
};

// The parts of a row, in order: for (const GroupPart part : GroupParts(layout)). Each has `most` half blocks, or the rest of
// its group. The class is both the range and its iterator.
class GroupParts {
 public:
  explicit GroupParts(const Layout& layout) : GroupParts(half_blocks(layout), layout.group_inputs() / kHalfInputs) {}

  // Begins with the part that contains half block `from`.
  LOWBIT_INLINE constexpr GroupParts(int64_t halves, int64_t group_halves, int64_t most = kSegmentHalves, int64_t from = 0)
      : halves_(halves), group_halves_(group_halves), most_(most), part_{} {
    const int64_t number = from % group_halves / most, group_parts = (group_halves + most - 1) / most;
    part_.group = from / group_halves;
    part_.index = part_.group * group_parts + number;
    begin_part(part_.group * group_halves + number * most, number == 0);
  }

  struct End {};
  LOWBIT_INLINE constexpr GroupParts begin() const { return *this; }
  LOWBIT_INLINE constexpr End end() const { return {}; }
  LOWBIT_INLINE constexpr bool operator!=(End) const { return part_.begin < halves_; }
  LOWBIT_INLINE constexpr const GroupPart& operator*() const { return part_; }
  LOWBIT_INLINE constexpr GroupParts& operator++() {
    part_.group += part_.last;
    ++part_.index;
    begin_part(part_.end, part_.last);
    return *this;
  }

 private:
  int64_t halves_, group_halves_, most_;
  GroupPart part_;

  LOWBIT_INLINE constexpr void begin_part(int64_t begin, bool first) {
    const int64_t whole = (part_.group + 1) * group_halves_, group_end = whole < halves_ ? whole : halves_;
    part_.begin = begin;
    part_.end = group_end - begin < most_ ? group_end : begin + most_;
    part_.first = first;
    part_.last = part_.end == group_end;
  }
};

}  // namespace
}  // namespace lowbit
