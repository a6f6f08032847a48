// The threads of a plan: every task runs once, also in many short jobs, after sleep, and in a forked process.

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "../../plan/team.h"

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
