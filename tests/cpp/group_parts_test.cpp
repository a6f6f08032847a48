// Segments and pieces of groups, compared with values computed for each half block.

#include "../../kernels/group_parts.h"

#include <gtest/gtest.h>

#include "../../kernels/format.h"

namespace lowbit::test {
namespace {

TEST(GroupParts, AreThoseThatTheirHalfBlocksSay) {
  for (const int64_t halves : {1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100}) {
    for (const int64_t group : {1, 2, 3, 4, 5, 6, 8, 9, 32, 33, 200}) {
      for (const int64_t most : {1, 2, 4, 32}) {
        for (int64_t from = 0; from < halves; ++from) {
          const int64_t parts_of_group = (group + most - 1) / most;
          int64_t half = from - from % group % most;
          for (const GroupPart part : GroupParts(halves, group, most, from)) {
            ASSERT_EQ(part.begin, half);
            ASSERT_LT(half, part.end);
            for (; half < part.end; ++half) {
              ASSERT_LT(half, halves);
              ASSERT_EQ(part.group, half / group);
              ASSERT_EQ(part.index, half / group * parts_of_group + half % group / most);
              ASSERT_EQ(part.first, half % group < most);
            }
            const bool group_ends = half == halves || half % group == 0;
            ASSERT_EQ(part.last, group_ends);
            ASSERT_TRUE(group_ends || half % group % most == 0);
          }
          ASSERT_EQ(half, halves);
        }
      }
    }
  }
}

// Kernels read the values of a segment and of a group at these indices.
TEST(GroupParts, AreAsManyAsTheLayoutSays) {
  for (const int64_t k : {1, 15, 16, 17, 48, 64, 65, 100, 128, 1000}) {
    for (const int64_t group_size : {0, 16, 32, 48, 64, 80, 128, 144, 1024}) {
      Layout layout;
      ASSERT_TRUE(make_layout(1, k, 4, group_size, Mapping::symmetric, false, &layout).ok());
      int64_t segments = 0, groups = 0;
      for (const GroupPart segment : GroupParts(layout)) {
        EXPECT_EQ(segment.index, segments++);
        EXPECT_EQ(segment.group, groups);
        groups += segment.last;
      }
      EXPECT_EQ(segments, layout.segments) << k << " " << group_size;
      EXPECT_EQ(groups, layout.groups) << k << " " << group_size;
    }
  }
}

constexpr bool is_constant() {
  for (const GroupPart part : GroupParts(5, 3, 2)) {
    if (part.index == 2) return part.begin == 3 && part.end == 5 && part.first && part.last;
  }
  return false;
}
static_assert(is_constant());

}  // namespace
}  // namespace lowbit::test
