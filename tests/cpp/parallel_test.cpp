// parallel_1d: every piece once, on any host's threads, and no piece waits for a stalled thread that others could
// serve.

#include "../../ops/parallel.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

// Hosts that call the tasks in other ways than one thread each.
void one_after_another(int count, void (*task)(void*, int), void* context) {
  for (int i = 0; i < count; ++i) task(context, i);
}
void backwards(int count, void (*task)(void*, int), void* context) {
  for (int i = count - 1; i >= 0; --i) task(context, i);
}

TEST(Parallel, EveryIndexOnce) {
  const Parallel hosts[] = {{},         {1, nullptr}, {4, one_after_another}, {4, backwards}, threads(2),
                            threads(7), threads(64)};
  for (const Parallel& host : hosts) {
    for (const int64_t count : {0, 1, 2, 5, 16, 100, 1000}) {
      for (const int64_t step : {1, 3, 100, 5000}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
        parallel_1d(host, count, step, [&](int64_t begin, int64_t end) {
          EXPECT_LT(begin, end);
          EXPECT_LE(end, count);
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const auto& visit : visits) ASSERT_EQ(visit, 1) << count << " in steps of " << step;
      }
    }
  }
}

// Many claims at the same time: the threads start together, and a piece is next to nothing.
TEST(Parallel, ClaimsThatRace) {
  constexpr int64_t kCount = 300000;
  constexpr int kThreads = 4;
  std::vector<std::atomic<uint8_t>> visits(kCount);
  static std::atomic<int> started;
  started = 0;
  const Parallel host{kThreads, [](int tasks, void (*task)(void*, int), void* context) {
                        std::vector<std::thread> running;
                        for (int i = 0; i < tasks; ++i) {
                          running.emplace_back([=] {
                            ++started;
                            while (started < tasks) std::this_thread::yield();
                            task(context, i);
                          });
                        }
                        for (std::thread& thread : running) thread.join();
                      }};
  parallel_1d(host, kCount, 1, [&](int64_t begin, int64_t) { ++visits[static_cast<size_t>(begin)]; });
  for (const auto& visit : visits) ASSERT_EQ(visit, 1);
}

TEST(Parallel, NoMoreTasksThanPieces) {
  static int asked;
  const Parallel host{8, [](int count, void (*task)(void*, int), void* context) {
                        asked = count;
                        one_after_another(count, task, context);
                      }};
  parallel_1d(host, 30, 10, [](int64_t, int64_t) {});
  EXPECT_EQ(asked, 3);
  asked = 0;
  parallel_1d(host, 10, 10, [](int64_t, int64_t) {});
  EXPECT_EQ(asked, 0) << "one piece stays on the caller's thread";
  parallel_1d(host, 1000, 10, [](int64_t, int64_t) {});
  EXPECT_EQ(asked, 8);
}

// The thread that takes the first piece does not return from it before all others are done. With pieces assigned in
// advance its share would never be served; the wait has an end only so that such a fault is a failure and no hang.
TEST(Parallel, AStalledThreadHoldsUpNothing) {
  constexpr int64_t kPieces = 100;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t finished = 0, finished_before_the_first = -1;
  parallel_1d(threads(3), kPieces, 1, [&](int64_t begin, int64_t end) {
    std::unique_lock lock(mutex);
    if (begin == 0) {
      changed.wait_for(lock, std::chrono::seconds(20), [&] { return finished == kPieces - 1; });
      finished_before_the_first = finished;
    }
    finished += end - begin;
    changed.notify_all();
  });
  EXPECT_EQ(finished_before_the_first, kPieces - 1);
  EXPECT_EQ(finished, kPieces);
}

}  // namespace
}  // namespace lowbit::test
