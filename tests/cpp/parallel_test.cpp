// parallel_1d and parallel_2d: every piece runs once, on any host's threads, and no piece waits for a stalled thread while
// others are free. Also a call's working memory and float settings.

#include "../../kernels/ukernel.h"
#include "../../ops/nodes.h"
#include "../../ops/schedule.h"
#include "../../ops/scratch.h"
#include "../../ops/sme_threads.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

// Hosts that do not use one thread per task.
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
        parallel_1d(host, count, step, [&](int, int64_t begin, int64_t end) {
          EXPECT_LT(begin, end);
          EXPECT_LE(end, count);
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const auto& visit : visits) ASSERT_EQ(visit, 1) << count << " in steps of " << step;
      }
    }
  }
}

// Many concurrent claims: the threads start together, and a piece takes almost no time.
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
  parallel_1d(host, kCount, 1, [&](int, int64_t begin, int64_t) { ++visits[static_cast<size_t>(begin)]; });
  for (const auto& visit : visits) ASSERT_EQ(visit, 1);
}

TEST(Parallel, NoMoreTasksThanPieces) {
  static int asked;
  const Parallel host{8, [](int count, void (*task)(void*, int), void* context) {
                        asked = count;
                        one_after_another(count, task, context);
                      }};
  parallel_1d(host, 30, 10, [](int, int64_t, int64_t) {});
  EXPECT_EQ(asked, 3);
  asked = 0;
  parallel_1d(host, 10, 10, [](int, int64_t, int64_t) {});
  EXPECT_EQ(asked, 0) << "one piece stays on the caller's thread";
  parallel_1d(host, 1000, 10, [](int, int64_t, int64_t) {});
  EXPECT_EQ(asked, 8);
}

// Two threads of a call never have the same number, so a worker's data needs no lock.
TEST(Parallel, WorkersAreApart) {
  constexpr int kThreads = 5;
  std::vector<std::atomic<int>> inside(kThreads);
  const auto visit = [&](int worker) {
    ASSERT_GE(worker, 0);
    ASSERT_LT(worker, kThreads);
    EXPECT_EQ(++inside[static_cast<size_t>(worker)], 1);
    std::this_thread::yield();
    --inside[static_cast<size_t>(worker)];
  };
  parallel_1d(threads(kThreads), 2000, 1, [&](int worker, int64_t, int64_t) { visit(worker); });
  std::vector<Band> bands(100);
  parallel_2d(threads(kThreads), Grid{100, 1, 1, 20, 1, 1}, bands.data(),
              [&](int worker, int64_t, int64_t) { visit(worker); },
              [&](int worker, int64_t, int64_t, int64_t) { visit(worker); });
}

TEST(Scratch, IsKeptForTheNextCall) {
  release_blocks();
  char* first;
  {
    const Scratch scratch(100000);
    first = scratch.data();
    ASSERT_EQ(reinterpret_cast<uintptr_t>(first) % kAlignment, 0u);
    std::memset(first, 1, 100000);
    EXPECT_EQ(kept_bytes(), 0) << "lent";
  }
  EXPECT_EQ(kept_bytes(), 1 << 17);
  {
    const Scratch scratch(1);
    EXPECT_EQ(scratch.data(), first) << "kept";
    const Scratch inner(100000);
    ASSERT_NE(inner.data(), first) << "lent already";
    std::memset(inner.data(), 2, 100000);
  }
  std::thread([] {
    const Scratch scratch(100000);
    EXPECT_EQ(kept_bytes(), 1 << 17) << "of two blocks one was taken, whatever thread they were on";
  }).join();
  EXPECT_EQ(kept_bytes(), 2 << 17);
  release_blocks();
  EXPECT_EQ(kept_bytes(), 0);
}

// Calls from many threads at once, small and large in turn, keep no more memory than a process may.
TEST(Scratch, OfIdleThreadsIsBounded) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 24; ++i) {
    threads.emplace_back([i] {
      for (int round = 0; round < 200; ++round) {
        const int64_t bytes = int64_t{1} << (10 + (i + 7 * round) % 16);
        const Scratch scratch(bytes), inner(bytes / 3 + 1);
        for (const Scratch* each : {&scratch, &inner}) std::memset(each->data(), i, 64);
        std::this_thread::yield();
        for (int at = 0; at < 64; ++at) ASSERT_EQ(scratch.data()[at], i) << "another thread has it, too";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(kept_bytes(), 0);
  EXPECT_LE(kept_bytes(), kKeptBytes);
  // The memory of the latest call is kept, whatever ran before.
  char* latest;
  {
    const Scratch scratch(kKeptBytes);
    latest = scratch.data();
    ASSERT_NE(latest, nullptr);
  }
  EXPECT_EQ(kept_bytes(), kKeptBytes);
  EXPECT_EQ(Scratch(kKeptBytes / 2 + 1).data(), latest);
  {
    const Scratch scratch(kKeptBytes + 1);
    ASSERT_NE(scratch.data(), nullptr);
  }
  EXPECT_EQ(kept_bytes(), kKeptBytes) << "more than that is not kept";
  release_blocks();
}

// Each thread of a call has its own memory, which is kept for the next call.
TEST(Scratch, OfACallWithManyThreadsIsKept) {
  constexpr int kThreads = 300;
  release_blocks();
  Random random(1);
  const Layout layout = layout_of(1024, 256, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  const Tensor x = random_tensor(ElementType::f32, {8, 256}, random), out(ElementType::f32, {8, 1024});
  ASSERT_TRUE(linear(x.view, weight.view, 1024, out.view, {kThreads, one_after_another}).ok());
  EXPECT_GE(kept_bytes(), kThreads * kLinearScratchBytes);
}

TEST(Scratch, TooMuchIsNoMemory) {
  static_assert(is_addressable(INT32_MAX, INT32_MAX) && !is_addressable(int64_t{1} << 32, INT32_MAX));
  EXPECT_EQ(allocate_aligned(-1), nullptr);
  EXPECT_EQ(Scratch(INT64_MAX / 2).data(), nullptr);
  const Scratch scratch(1000);
  EXPECT_NE(scratch.data(), nullptr);
}

// The thread with the first piece waits in it until all others are done. If pieces were assigned in advance, its other pieces
// would never run. The wait has a timeout, so that such a fault is a failure and not a hang.
TEST(Parallel, AStalledThreadHoldsUpNothing) {
  constexpr int64_t kPieces = 100;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t finished = 0, finished_before_the_first = -1;
  parallel_1d(threads(3), kPieces, 1, [&](int, int64_t begin, int64_t end) {
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

// A grid that records every visit.
struct Visits {
  Grid grid;
  std::vector<std::atomic<int>> prepared, tiles;
  std::vector<Band> bands;

  explicit Visits(const Grid& g)
      : grid(g), prepared(static_cast<size_t>(g.rows)), tiles(static_cast<size_t>(g.bands() * g.columns)),
        bands(static_cast<size_t>(g.bands() * g.nodes)) {}

  void prepare(int64_t begin, int64_t end) {
    EXPECT_LT(begin, end);
    EXPECT_LE(end, grid.rows);
    for (int64_t i = begin; i < end; ++i) ++prepared[static_cast<size_t>(i)];
  }
  void tile(int64_t band, int64_t begin, int64_t end) {
    EXPECT_LT(begin, end);
    EXPECT_LE(end, grid.columns);
    for (int64_t i = 0; i < grid.rows_of(band); ++i) {
      EXPECT_EQ(prepared[static_cast<size_t>(band * grid.band_rows + i)], 1) << "a tile of rows that are not prepared";
    }
    for (int64_t i = begin; i < end; ++i) ++tiles[static_cast<size_t>(band * grid.columns + i)];
  }
  void run(const Parallel& parallel) {
    parallel_2d(parallel, grid, bands.data(), [&](int, int64_t begin, int64_t end) { prepare(begin, end); },
                [&](int, int64_t band, int64_t begin, int64_t end) { tile(band, begin, end); });
    for (const auto& visit : prepared) ASSERT_EQ(visit, 1);
    for (const auto& visit : tiles) ASSERT_EQ(visit, 1);
  }
};

TEST(Parallel2d, EveryRowAndEveryTileOnce) {
  const Parallel hosts[] = {{},         {1, nullptr}, {4, one_after_another}, {4, backwards}, threads(2),
                            threads(7), threads(64)};
  for (const Parallel& host : hosts) {
    for (const int64_t rows : {1, 31, 32, 33, 200}) {
      for (const int64_t columns : {1, 2, 17, 300}) {
        for (const int64_t least : {1, 3, 400}) Visits({rows, 32, 5, columns, least, least + 4}).run(host);
      }
    }
    Visits({0, 32, 5, 10, 1, 8}).run(host);
  }
}

int odd_or_even(int worker) { return worker % 2; }
int second(int) { return 1; }

TEST(Parallel2d, EveryRowAndEveryTileOnceOnSeveralNodes) {
  for (const Parallel& host : {Parallel{}, {4, one_after_another}, {4, backwards}, threads(2), threads(7)}) {
    for (const int64_t nodes : {2, 3, 8}) {
      for (const int64_t columns : {1, 2, 17, 300}) {
        for (const int64_t least : {1, 3, 400}) Visits({100, 32, 5, columns, least, least + 4, nodes, odd_or_even}).run(host);
      }
    }
  }
}

// A thread of the second of three nodes computes that node's part, then the third's, then the first's.
TEST(Parallel2d, OwnPartsFirst) {
  const Grid grid{4, 2, 2, 90, 2, 8, 3, second};
  std::vector<Band> bands(6);
  std::vector<int64_t> begins;
  parallel_2d({2, one_after_another}, grid, bands.data(), [](int, int64_t, int64_t) {},
              [&](int, int64_t band, int64_t begin, int64_t) { begins.push_back(band * 1000 + begin); });
  std::vector<int64_t> parts;  // of a band, in the order of their first claims
  for (const int64_t begin : begins) {
    const int64_t part = begin / 1000 * 1000 + begin % 1000 / 30 * 30;
    if (parts.empty() || parts.back() != part) parts.push_back(part);
  }
  EXPECT_EQ(parts, (std::vector<int64_t>{30, 1030, 60, 1060, 0, 1000}));
}

// Threads of two nodes: none steals while its own node has tiles.
TEST(Parallel2d, StealsLast) {
  const Grid grid{1, 1, 1, 2000, 1, 8, 2, odd_or_even};
  std::vector<Band> bands(2);
  bands[0].claimed_rows = bands[0].prepared_rows = 1;
  constexpr int kThreads = 4;
  std::vector<int64_t> stolen(kThreads);
  parallel_2d(threads(kThreads), grid, bands.data(), [](int, int64_t, int64_t) {},
              [&](int worker, int64_t, int64_t begin, int64_t end) {
                const bool own = begin / 1000 == worker % 2;
                EXPECT_FALSE(own && stolen[static_cast<size_t>(worker)] > 0);
                if (!own) stolen[static_cast<size_t>(worker)] += end - begin;
              });
}

// One thread is four times as slow as the other, by a clock of finished columns: it gets its proportional share, plus one
// claim.
TEST(Parallel2d, ASlowThreadTakesLess) {
  const Grid grid{1, 1, 1, 1000, 1, 8};
  Band band;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t fast = 0, slow = 0;
  std::thread::id slow_thread;
  parallel_2d(threads(2), grid, &band, [&](int, int64_t, int64_t) {},
              [&](int worker, int64_t, int64_t begin, int64_t end) {
                std::unique_lock lock(mutex);
                if (worker == 1) {
                  const int64_t until = fast + 4 * (end - begin);
                  slow += end - begin;
                  changed.wait_for(lock, std::chrono::seconds(20), [&] { return fast >= until || fast + slow == 1000; });
                } else {
                  fast += end - begin;
                  changed.notify_all();
                }
              });
  EXPECT_EQ(fast + slow, 1000);
  EXPECT_LE(slow, 1000 / 5 + 8);
}

TEST(Parallel2d, ClaimsThatRace) {
  for (int round = 0; round < 20; ++round) {
    Visits({64, 1, 1, 1000, 1, 2}).run(threads(4));
    Visits({64, 1, 1, 1000, 1, 2, 2, odd_or_even}).run(threads(4));
  }
}

// Claims have the largest allowed size while much is left, and at least the smallest allowed size except at the end of a band.
TEST(Parallel2d, ClaimsShrinkTowardsTheEnd) {
  const Grid grid{40, 20, 20, 100, 2, 8};
  std::vector<Band> bands(2);
  std::vector<int64_t> sizes;
  parallel_2d({4, one_after_another}, grid, bands.data(), [](int, int64_t, int64_t) {},
              [&](int, int64_t, int64_t begin, int64_t end) { sizes.push_back(end - begin); });
  EXPECT_EQ(sizes.front(), 8);
  EXPECT_EQ(sizes[11], 8) << "of the first band, with all of the second still to do";
  EXPECT_EQ(sizes[12], 4) << "what is left of the first band";
  EXPECT_EQ(sizes[sizes.size() - 2], 2);
  for (size_t i = 14; i < sizes.size(); ++i) EXPECT_LE(sizes[i], sizes[i - 1]);
  EXPECT_GT(sizes.size(), 13u + 13u);
}

// The thread that prepares the first rows waits until all tiles of the other bands are done, which the other threads must be
// able to do. The wait has a timeout, so that a fault is a failure and not a hang.
TEST(Parallel2d, AStalledPreparationHoldsUpItsBandOnly) {
  Visits visits({96, 32, 4, 50, 1, 8});
  std::mutex mutex;
  std::condition_variable changed;
  int64_t finished = 0, finished_before_the_first = -1;
  parallel_2d(
      threads(3), visits.grid, visits.bands.data(),
      [&](int, int64_t begin, int64_t end) {
        if (begin == 0) {
          std::unique_lock lock(mutex);
          changed.wait_for(lock, std::chrono::seconds(20), [&] { return finished == 2 * 50; });
          finished_before_the_first = finished;
        }
        visits.prepare(begin, end);
      },
      [&](int, int64_t band, int64_t begin, int64_t end) {
        visits.tile(band, begin, end);
        const std::lock_guard lock(mutex);
        finished += end - begin;
        changed.notify_all();
      });
  EXPECT_EQ(finished_before_the_first, 2 * 50);
  EXPECT_EQ(finished, 3 * 50);
}

// The same for the thread with the first tile: the others do all the rest.
TEST(Parallel2d, AStalledTileHoldsUpNothing) {
  Visits visits({96, 32, 4, 50, 1, 8});
  std::mutex mutex;
  std::condition_variable changed;
  int64_t finished = 0, size_of_the_first = -1, finished_before_the_first = -1;
  parallel_2d(
      threads(3), visits.grid, visits.bands.data(), [&](int, int64_t begin, int64_t end) { visits.prepare(begin, end); },
      [&](int, int64_t band, int64_t begin, int64_t end) {
        visits.tile(band, begin, end);
        std::unique_lock lock(mutex);
        if (size_of_the_first < 0) {
          size_of_the_first = end - begin;
          changed.wait_for(lock, std::chrono::seconds(20), [&] { return finished == 3 * 50 - size_of_the_first; });
          finished_before_the_first = finished;
        }
        finished += end - begin;
        changed.notify_all();
      });
  EXPECT_EQ(finished_before_the_first, 3 * 50 - size_of_the_first);
  EXPECT_EQ(finished, 3 * 50);
}

// A directory like the system's, with nodes of the given CPUs.
std::filesystem::path directory_of(const char* name, const std::vector<std::pair<int, const char*>>& nodes) {
  // ctest runs this for several ISAs at once, each in a process.
  static const std::string process = std::to_string(std::random_device{}());
  const std::filesystem::path directory = std::filesystem::path(testing::TempDir()) / ("lowbit-" + process) / name;
  std::filesystem::remove_all(directory);
  for (const auto& [number, cpus] : nodes) {
    const std::filesystem::path node = directory / ("node" + std::to_string(number));
    std::filesystem::create_directories(node);
    std::ofstream(node / "cpulist") << cpus << "\n";
  }
  return directory;
}

Nodes nodes_of(const char* name, const std::vector<std::pair<int, const char*>>& nodes,
               bool (*may_use)(int) = [](int) { return true; }) {
  return read_nodes(directory_of(name, nodes).string().c_str(), may_use);
}

#ifdef __linux__
TEST(SmeThreads, ClustersWithCpusThatAreOffline) {
  const std::string directory = testing::TempDir() + "lowbit_clusters" + std::to_string(getpid());
  const auto write = [&](int cpu, const char* id) {
    const std::string topology = directory + "/cpu" + std::to_string(cpu) + "/topology";
    std::filesystem::create_directories(topology);
    std::ofstream(topology + "/cluster_id") << id;
  };
  EXPECT_EQ(clusters_in(directory.c_str()), 0);
  std::filesystem::create_directories(directory + "/cpu1");  // offline, as CPUs 3 to 8
  write(0, "36");
  write(2, "36");
  write(9, "518");
  EXPECT_EQ(clusters_in(directory.c_str()), 2);
  write(10, "-1");  // not known
  write(11, "");
  EXPECT_EQ(clusters_in(directory.c_str()), 2);
  write(700, "4");
  EXPECT_EQ(clusters_in(directory.c_str()), 3);
  std::filesystem::remove_all(directory);
}
#endif

TEST(Nodes, AreThoseOfTheSystemWithCpus) {
  const Nodes nodes = nodes_of("two", {{0, "0-3,8,10-11"}, {1, ""}, {5, "4-7,9"}});
  EXPECT_EQ(nodes.count, 2);
  for (const int cpu : {0, 1, 2, 3, 8, 10, 11}) EXPECT_EQ(nodes.of_cpu[cpu], 0) << cpu;
  for (const int cpu : {4, 5, 6, 7, 9}) EXPECT_EQ(nodes.of_cpu[cpu], 1) << cpu;
  EXPECT_EQ(nodes.of_cpu[12], Nodes::kNone);
}

TEST(Nodes, AreOneWhereThereIsNothingToChoose) {
  EXPECT_EQ(read_nodes("/nowhere", [](int) { return true; }).count, 1);
  EXPECT_EQ(nodes_of("one", {{0, "0-3"}}).count, 1);
  EXPECT_EQ(nodes_of("bound", {{0, "0-3"}, {1, "4-7"}}, [](int cpu) { return cpu < 4; }).count, 1);
  EXPECT_EQ(nodes_of("beyond", {{0, "0-3"}, {1, "4-5000"}}).count, 1);
  EXPECT_EQ(nodes_of("half", {{0, "0-3"}, {1, "4-"}}).count, 1);
  std::vector<std::pair<int, const char*>> many;
  static constexpr const char* kCpus[] = {"0", "1", "2", "3", "4", "5", "6", "7", "8"};
  for (int i = 0; i < 9; ++i) many.emplace_back(i, kCpus[i]);
  EXPECT_EQ(nodes_of("many", many).count, 1);
  many.pop_back();
  EXPECT_EQ(nodes_of("eight", many).count, 8);
}

// Nodes change which thread computes what, but no bits.
TEST(Nodes, ChangeNoBit) {
  const Nodes before = memory_nodes();
  Random random(1);
  const Layout layout = layout_of(1000, 256, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  for (const int64_t rows : {1, 5, 70}) {
    const Tensor x = random_tensor(ElementType::f32, {rows, 256}, random);
    const Tensor expected(ElementType::f32, {rows, 1000});
    ASSERT_TRUE(linear(x.view, weight.view, 1000, expected.view, {}).ok());
    for (const int count : {2, 3, 8}) {
      Nodes nodes = before;
      nodes.count = count;
      for (int cpu = 0; cpu < Nodes::kMostCpus; ++cpu) nodes.of_cpu[cpu] = static_cast<uint8_t>(cpu % count);
      set_memory_nodes(nodes);
      const Tensor out(ElementType::f32, {rows, 1000});
      ASSERT_TRUE(linear(x.view, weight.view, 1000, out.view, threads(5)).ok());
      EXPECT_EQ(std::memcmp(out.view.data, expected.view.data, static_cast<size_t>(rows) * 4000), 0) << rows << ", " << count;
    }
  }
  set_memory_nodes(before);
}

}  // namespace
}  // namespace lowbit::test
