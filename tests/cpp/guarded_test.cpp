// The tests' buffers detect reads and writes beyond their ends on this system.

#include "support/guarded.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace lowbit::test {
namespace {

void touch(Wall wall, bool write) {
  Guarded buffer(100, wall);
  volatile uint8_t* const beyond = wall == Wall::after ? buffer.data() + 100 : buffer.data() - 1;
  if (write) *beyond = 1;
  else (void)*beyond;
}

TEST(GuardedDeathTest, AccessesBeyondABufferEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Wall wall : {Wall::after, Wall::before}) {
    for (const bool write : {false, true}) EXPECT_DEATH(touch(wall, write), "") << write;
  }
}

TEST(Guarded, BytesBesideABufferAreWatched) {
  for (const Wall wall : {Wall::after, Wall::before}) {
    Guarded buffer(100, wall, 3);
    buffer.data()[0] = buffer.data()[99] = 1;
    EXPECT_TRUE(buffer.intact());
    uint8_t& beside = wall == Wall::after ? buffer.data()[100] : buffer.data()[-1];
    const uint8_t before = beside;
    beside ^= 1;
    EXPECT_FALSE(buffer.intact());
    beside = before;
    buffer.freeze();
    buffer.data()[50] ^= 1;
    EXPECT_FALSE(buffer.intact());
  }
}

// Runs for large pages state the page size, because an emulator may not provide it (QEMU 11 ignores QEMU_PAGESIZE).
TEST(Guarded, PagesHaveTheSizeThatIsRequired) {
  const char* const required = std::getenv("LOWBIT_REQUIRE_PAGE_SIZE");
  if (required == nullptr) GTEST_SKIP() << "LOWBIT_REQUIRE_PAGE_SIZE is not set";
  EXPECT_EQ(std::to_string(page_size()), required);
}

}  // namespace
}  // namespace lowbit::test
