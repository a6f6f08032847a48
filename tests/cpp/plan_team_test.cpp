// The threads of a plan: every task runs once, also in many short jobs, after sleep, and in a forked process.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "../../plan/cores.h"
#include "../../plan/team.h"
#include "support/tensors.h"

#ifdef __linux__
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace lowbit::test {
namespace {

// Whether each piece of a job ran once.
bool runs(const Team::Awake& awake, int64_t pieces) {
  std::vector<std::atomic<int>> visits(static_cast<size_t>(pieces));
  parallel_1d(awake.parallel(), pieces, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  for (const auto& visit : visits) {
    if (visit != 1) return false;
  }
  return true;
}

TEST(PlanTeam, ManyJobs) {
  for (const int threads : {1, 2, 3, 8}) {
    Team team(threads);
    EXPECT_EQ(team.threads(), threads);
    const Team::Awake awake(team);
    EXPECT_EQ(awake.parallel().threads, threads);
    for (int64_t job = 0; job < 3000; ++job) ASSERT_TRUE(runs(awake, job % 7)) << job;
    EXPECT_TRUE(runs(awake, 20000));
  }
}

TEST(PlanTeam, ThreadsOfTheHost) {
  int jobs = 0;
  const auto run = [](void* host, int count, void (*task)(void*, int), void* context) {
    ++*static_cast<int*>(host);
    for (int i = count - 1; i >= 0; --i) task(context, i);
  };
  Team team({3, run, &jobs});
  EXPECT_EQ(team.threads(), 3);
  const Team::Awake awake(team);
  EXPECT_TRUE(runs(awake, 20000));
  EXPECT_GE(jobs, 1);
}

TEST(PlanTeam, SleepsAndWakes) {
  Team team(3);
  for (int call = 0; call < 1000; ++call) {
    const Team::Awake awake(team);
    if (call % 3 != 0) {
      ASSERT_TRUE(runs(awake, 5));
    }
  }
}

TEST(PlanTeam, BeginsAndEnds) {
  for (int i = 0; i < 300; ++i) {
    Team team(1 + i % 4);
    if (i % 2 == 0) continue;  // without a call
    const Team::Awake awake(team);
    ASSERT_TRUE(runs(awake, 4));
  }
}

// Each thread has a number of its own, which stays the same, so it finds its part of the weights in every call.
TEST(PlanTeam, NumbersOfThreads) {
  constexpr int kThreads = 4;
  Team team(kThreads);
  const Team::Awake awake(team);
  const Parallel parallel = awake.parallel();
  EXPECT_EQ(parallel.part(0), 0);
  std::thread::id ids[kThreads];
  ids[0] = std::this_thread::get_id();
  for (int job = 0; job < 200; ++job) {
    std::pair<int, std::thread::id> seen[kThreads];
    parallel_1d(parallel, kThreads, 1, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) seen[i] = {parallel.part(0), std::this_thread::get_id()};
    });
    for (const auto& [part, id] : seen) {
      ASSERT_GE(part, 0);
      ASSERT_LT(part, kThreads);
      if (ids[part] == std::thread::id()) ids[part] = id;
      ASSERT_EQ(ids[part], id);
    }
  }
}

// Helpers without work prefetch what they are told to, also addresses that do not exist.
TEST(PlanTeam, PrefetchesAnyAddress) {
  constexpr int kHelpers = 3;
  Team team(kHelpers + 1);
  const std::vector<uint8_t> memory(1 << 16);
  const FirstWeights weights[kHelpers] = {{memory.data(), 1 << 14, 4}, {nullptr, 100, 2}, {memory.data() + (1 << 15), 1, 1}};
  const FirstWeights nowhere[kHelpers] = {{reinterpret_cast<const uint8_t*>(4096), int64_t{1} << 40, 4}, {}, {}};
  for (int call = 0; call < 30; ++call) {
    const Team::Awake awake(team);
    awake.prefetch(call % 3 == 0 ? nowhere : weights);
    ASSERT_TRUE(runs(awake, 20));
    ASSERT_TRUE(runs(awake, 3));
  }
}

// Each thread's part of two matrices begins with other panels, within the packed bytes. Results are those of one thread.
TEST(PlanTeam, FirstWeights) {
  Random random(7);
  const Layout layouts[] = {layout_of(512, 256, 4, 32, Mapping::symmetric, false),
                            layout_of(320, 256, 8, 32, Mapping::affine, true)};
  const int64_t sizes[] = {512, 320};
  Tensor packed_weights[] = {bytes_tensor(packed(random_weights(layouts[0], random))),
                             bytes_tensor(packed(random_weights(layouts[1], random)))};
  const TensorView views[] = {packed_weights[0].view, packed_weights[1].view};
  const Tensor x = random_tensor(ElementType::f32, {1, 256}, random);
  const Tensor alone(ElementType::f32, {1, 832}), shared(ElementType::f32, {1, 832});
  ASSERT_TRUE(linears(x.view, views, sizes, 2, alone.view, {}).ok());
  constexpr int kThreads = 3;
  Team team(kThreads);
  const Team::Awake awake(team);
  const Parallel parallel = awake.parallel();
  FirstWeights first[kThreads];
  for (int part = 0; part < kThreads; ++part) {
    first[part] = first_weights(x.view, views, sizes, 2, shared.view, parallel, part);
    ASSERT_GE(first[part].panels, 1) << part;
    bool within = false;
    for (int m = 0; m < 2; ++m) {
      const uint8_t* const panels = static_cast<const uint8_t*>(views[m].data) + layouts[m].header_bytes;
      const int64_t at = first[part].begin - panels;
      within = within || (at >= 0 && at % layouts[m].panel_bytes == 0 && first[part].bytes == layouts[m].panel_bytes &&
                          at / layouts[m].panel_bytes + first[part].panels <= layouts[m].panels);
    }
    EXPECT_TRUE(within) << part;
    for (int other = 0; other < part; ++other) EXPECT_NE(first[part].begin, first[other].begin);
  }
  for (int call = 0; call < 20; ++call) {
    awake.prefetch(first + 1);
    ASSERT_TRUE(linears(x.view, views, sizes, 2, shared.view, parallel).ok());
    ASSERT_EQ(shared.bytes(), alone.bytes());
  }
  // One thread, a thread that does not exist, and a matrix that is refused have no parts.
  EXPECT_EQ(first_weights(x.view, views, sizes, 2, shared.view, {}, 0).panels, 0);
  EXPECT_EQ(first_weights(x.view, views, sizes, 2, shared.view, parallel, kThreads).panels, 0);
  EXPECT_EQ(first_weights(x.view, &x.view, sizes, 1, shared.view, parallel, 0).panels, 0);
}

// The fast cores of made-up machines: capacity, or the highest frequency, of each CPU, and the CPUs of a core.
TEST(PlanTeam, FastCores) {
  namespace fs = std::filesystem;
  struct Cpu {
    int capacity, frequency;
    const char* siblings;
  };
  const auto count = [](const std::vector<Cpu>& cpus, std::vector<int> usable) {
    const fs::path directory = fs::temp_directory_path() / ("lowbit_cores_" + std::to_string(std::rand()));
    const auto write = [](const fs::path& file, const std::string& text) {
      fs::create_directories(file.parent_path());
      std::ofstream(file) << text << "\n";
    };
    for (size_t i = 0; i < cpus.size(); ++i) {
      const fs::path at = directory / ("cpu" + std::to_string(i));
      fs::create_directories(at);
      if (cpus[i].capacity != 0) write(at / "cpu_capacity", std::to_string(cpus[i].capacity));
      if (cpus[i].frequency != 0) write(at / "cpufreq" / "cpuinfo_max_freq", std::to_string(cpus[i].frequency));
      if (cpus[i].siblings != nullptr) write(at / "topology" / "thread_siblings_list", cpus[i].siblings);
    }
    const int result = count_fast_cores(directory.string().c_str(), usable);
    fs::remove_all(directory);
    return result;
  };
  // A phone: four small cores, three medium ones, a large one.
  const std::vector<Cpu> phone = {{250, 1800000, "0"}, {250, 1800000, "1"}, {250, 1800000, "2"}, {250, 1800000, "3"},
                                  {770, 2400000, "4"}, {770, 2400000, "5"}, {770, 2400000, "6"}, {1024, 2800000, "7"}};
  EXPECT_EQ(count(phone, {0, 1, 2, 3, 4, 5, 6, 7}), 4);
  EXPECT_EQ(count(phone, {0, 1, 2, 3}), 4);  // what the process may use decides
  EXPECT_EQ(count(phone, {3, 7}), 1);
  // A hybrid CPU without capacities: two large cores of two threads each, whose frequencies differ, and two small ones.
  const std::vector<Cpu> hybrid = {{0, 5200000, "0-1"}, {0, 5200000, "0-1"}, {0, 5000000, "2-3"},
                                   {0, 5000000, "2-3"}, {0, 3900000, "4"},   {0, 3900000, "5"}};
  EXPECT_EQ(count(hybrid, {0, 1, 2, 3, 4, 5}), 2);
  EXPECT_EQ(count(hybrid, {1, 4, 5}), 1);
  // A server whose cores are equal, one that says nothing, and a machine without files.
  EXPECT_EQ(count({{1024, 0, "0,2"}, {1024, 0, "1,3"}, {1024, 0, "0,2"}, {1024, 0, "1,3"}}, {0, 1, 2, 3}), 2);
  EXPECT_EQ(count({{0, 0, nullptr}, {0, 0, nullptr}}, {0, 1}), 2);
  EXPECT_EQ(count_fast_cores("/nowhere", {0, 1, 2}), 3);
  EXPECT_EQ(count_fast_cores("/nowhere", {}), 0);
  EXPECT_GE(default_threads(), 1);
}

// Several teams, each with calls from another thread; and a team of a thread that has another one.
TEST(PlanTeam, OfSeveralThreads) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      Team team(2), inner(3);
      for (int call = 0; call < 200; ++call) {
        const Team::Awake awake(team);
        if (!runs(awake, 6)) ++wrong;
        {
          const Team::Awake second(inner);
          if (!runs(second, 6)) ++wrong;
        }
        if (!runs(awake, 6)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// A team that one thread after another uses.
TEST(PlanTeam, MovesBetweenThreads) {
  Team team(3);
  for (int i = 0; i < 50; ++i) {
    bool right = false;
    std::thread([&] {
      const Team::Awake awake(team);
      right = runs(awake, 9);
    }).join();
    ASSERT_TRUE(right);
  }
}

#ifdef __linux__
// A forked process has only the thread that forked. Its team runs all tasks on it, and ends without the other threads, whose
// memory new threads may have taken over.
TEST(PlanTeam, InAForkedProcess) {
  if (std::getenv("QEMU_CPU") != nullptr) GTEST_SKIP() << "QEMU ends when a forked process starts threads";
  auto team = std::make_unique<Team>(4);
  const auto check = [](Team& each) {
    const Team::Awake awake(each);
    return runs(awake, 100);
  };
  ASSERT_TRUE(check(*team));
  const auto in_child = [&](const auto& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // instead of a test that hangs
      _exit(body() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
  };
  EXPECT_EQ(in_child([&] { return check(*team) && check(*team); }), 0);
  EXPECT_EQ(in_child([&] {
    const Team::Awake awake(*team);
    return runs(awake, 10);
  }), 0);
  EXPECT_EQ(in_child([&] {
    team.reset();
    return true;
  }), 0);
  EXPECT_EQ(in_child([&] {
    auto own = std::make_unique<Team>(4);
    const bool right = check(*own) && check(*team);
    team.reset();
    const bool still = check(*own);
    own.reset();
    return right && still;
  }), 0);
  {
    const Team::Awake awake(*team);  // the other threads are awake while the process forks
    EXPECT_EQ(in_child([&] { return runs(awake, 50); }), 0);
    EXPECT_TRUE(runs(awake, 50));
  }
  EXPECT_TRUE(check(*team)) << "the parent's";
}
#endif

}  // namespace
}  // namespace lowbit::test
