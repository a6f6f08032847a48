// Failed allocations: each allocation of each operator call fails in turn, alone or together with all later ones. The call must
// return an error, or succeed without the memory and give the same bits. Nothing may leak, and the next call on the same thread
// must be right. Under AddressSanitizer (make test-sanitize) each leaked block is reported.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "../../ops/scratch.h"
#include "support/build.h"
#include "support/calls.h"
#include "support/failing_allocator.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

// A second thread, started before memory runs out. It belongs to the host, not to the operators.
class SecondThread {
 public:
  SecondThread() : thread_([this] { serve(); }) {}
  ~SecondThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void run(int count, void (*task)(void*, int), void* context) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      last_ = count - 1;
    }
    changed_.notify_all();
    for (int i = 0; i < count - 1; ++i) task(context, i);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return task_ == nullptr; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ends_ || task_ != nullptr; });
      if (ends_) return;
      const auto task = task_;
      lock.unlock();
      task(context_, last_);
      lock.lock();
      task_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int last_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

Parallel two_threads() {
  static SecondThread* const second = new SecondThread;  // never destroyed, because its thread may outlive main()
  return {2, [](int count, void (*task)(void*, int), void* context) { second->run(count, task, context); }};
}

// The outcome when allocation `number` (0, 1, ...) fails.
struct Outcome {
  Status status;
  bool reached;  // whether there was such an allocation
};

Outcome fail_at(int64_t number, bool all_after, const std::function<Status()>& call) {
  Outcome outcome;
  const int64_t asked = allocations();
  fail_allocation(number, all_after);
  outcome.status = call();
  fail_no_allocation();
  outcome.reached = allocations() - asked > number;
  return outcome;
}

// `check` must hold after each successful call, including the one with enough memory.
int64_t fail_each(const std::string& name, const std::function<Status()>& call, const std::function<void()>& check,
                  const char* says = "no memory for ", Status::Kind kind = Status::Kind::no_memory) {
  int64_t most = 0, before = 0;
  for (const bool all_after : {false, true}) {
    for (int64_t number = 0;; ++number) {
      const std::string what = name + ", allocation " + std::to_string(number) + (all_after ? " and all after it" : "");
      bool reached = false;
      release_blocks();
      std::thread([&] {
        const Outcome outcome = fail_at(number, all_after, call);
        reached = outcome.reached;
        if (outcome.status.ok()) {
          check();
        } else {
          EXPECT_TRUE(refused(outcome.status, says, kind)) << what;
          EXPECT_TRUE(reached) << what;
        }
        const Status again = call();
        EXPECT_TRUE(again.ok()) << what << ", the next call: " << again.message();
        check();
      }).join();
      release_blocks();
      // The second thread keeps its memory. From here on, calls with enough memory may leave nothing allocated.
      if (number == 0) before = blocks_in_use();
      EXPECT_LE(blocks_in_use(), before) << what << " leaks";
      if (!reached) {
        most = number > most ? number : most;
        break;
      }
      if (number == 1000) {
        ADD_FAILURE() << what << ": a call asks for memory without end";
        break;
      }
    }
  }
  return most;
}

TEST(Allocation, EachOfEachOperatorFails) {
  const Parallel two = two_threads();
  int64_t all = 0;
  for (const Call& call : make_calls()) {
    std::vector<uint8_t> out(call.expected.size());
    for (const Parallel& parallel : {Parallel(), two}) {
      const int64_t allocations = fail_each(
          call.name, [&] { return call.run(parallel, out.data()); },
          [&] {
            EXPECT_EQ(out, call.expected) << call.name;
            std::fill(out.begin(), out.end(), uint8_t{0});
          });
      const bool needs_none = call.name == "unpack" || call.name == "embedding, 0 rows";
      EXPECT_EQ(allocations == 0, needs_none) << call.name << ": " << allocations;
      all += allocations;
    }
  }
  EXPECT_GT(all, 100);
}

// Memory of a small call is kept, and the allocation for a larger call fails.
TEST(Allocation, LessIsKept) {
  const std::vector<Call> calls = make_calls();
  release_blocks();
  const auto named = [&](const char* name) -> const Call& {
    for (const Call& call : calls) {
      if (call.name == name) return call;
    }
    ADD_FAILURE() << "no call '" << name << "'";
    return calls[0];
  };
  const Call& small = named("embedding, 3 rows");
  const Call& large = named("linear, 4 bits, symmetric, 300 rows");
  std::vector<uint8_t> out(large.expected.size()), rows(small.expected.size());
  std::thread([&] {
    EXPECT_TRUE(small.run({}, rows.data()).ok());
    EXPECT_TRUE(refused(fail_at(0, false, [&] { return large.run({}, out.data()); }).status, "no memory for ",
                        Status::Kind::no_memory));
    std::fill(rows.begin(), rows.end(), uint8_t{0});
    EXPECT_TRUE(small.run({}, rows.data()).ok());
    EXPECT_EQ(rows, small.expected);
    EXPECT_TRUE(large.run({}, out.data()).ok());
    EXPECT_EQ(out, large.expected);
    const Outcome next = fail_at(0, true, [&] { return large.run({}, out.data()); });
    EXPECT_TRUE(next.status.ok()) << "what was kept is enough: " << next.status.message();
    EXPECT_FALSE(next.reached);
  }).join();
}

// A host that runs a call inside another one on the same thread.
TEST(Allocation, ACallInsideOfACall) {
  static const std::vector<Call> calls = make_calls();
  static const Call& inner = calls[0];
  static std::vector<uint8_t> inner_out;
  static Status inner_status;
  const Parallel host{2, [](int count, void (*task)(void*, int), void* context) {
                        inner_status = inner.run({}, inner_out.data());
                        for (int i = 0; i < count; ++i) task(context, i);
                      }};
  int64_t inner_failed = 0;
  for (const Call& call : calls) {
    if (call.name != "linear, 4 bits, symmetric, 300 rows") continue;
    std::vector<uint8_t> out(call.expected.size());
    inner_out.assign(inner.expected.size(), 0);
    fail_each(
        call.name + " around another one", [&] { return call.run(host, out.data()); },
        [&] {
          EXPECT_EQ(out, call.expected);
          inner_failed += !inner_status.ok();
          if (inner_status.ok()) {
            EXPECT_EQ(inner_out, inner.expected);
          } else {
            EXPECT_EQ(inner_status.kind(), Status::Kind::no_memory);
          }
        });
  }
  EXPECT_GT(inner_failed, 0);
}

// Allocation `number` fails while a process loads a library; a library that did not load can be loaded later. The dynamic
// linker tolerates some failed allocations.
enum Loaded { kAll, kWithout, kRefused, kWrong };
Loaded load_failing(const char* path, int64_t number) {
  const size_t rows = linear_kernel_count();
  const Outcome outcome = fail_at(number, false, [&] { return load_kernels(path); });
  if (!outcome.status.ok()) {
    const bool system = outcome.status.kind() == Status::Kind::system;
    const bool said = refused(outcome.status, system ? "kernel library does not load: " : "no memory for ",
                              system ? Status::Kind::system : Status::Kind::no_memory);
    if (!said || linear_kernel_count() != rows || !load_kernels(path).ok()) return kWrong;
  }
  if (linear_kernel_count() == rows || find_format(vendor_format("ROWS")) == nullptr) return kWrong;
  return !outcome.reached ? kAll : outcome.status.ok() ? kWithout : kRefused;
}

TEST(AllocationOfLibraries, EachOfLoadingFails) {
  const std::string path = std::string(kTestLibraries) + "own_format.so";
  int refusals = 0;
  for (int64_t number = 0;; ++number) {
    ASSERT_LT(number, 1000);
    const pid_t child = fork();
    if (child == 0) _exit(load_failing(path.c_str(), number));
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "allocation " << number << " ends the process";
    EXPECT_NE(WEXITSTATUS(status), kWrong) << "allocation " << number;
    refusals += WEXITSTATUS(status) == kRefused;
    if (WEXITSTATUS(status) == kAll) break;
  }
  EXPECT_GT(refusals, 0);
}

TEST(AllocationOfLibraries, EachOfTheirFormatsFails) {
  ASSERT_TRUE(load_kernels((std::string(kTestLibraries) + "own_format.so").c_str()).ok());
  Random random(1);
  const Layout layout = layout_of(40, 70, 4, 32, Mapping::symmetric, true);
  const Tensor source = bytes_tensor(packed(random_weights(layout, random)));
  Layout target;
  ASSERT_TRUE(repack_shape(source.view, "ROWS", &target).ok());
  Tensor bytes(ElementType::u8, {target.total_bytes});
  ASSERT_TRUE(repack(source.view, "ROWS", bytes.view, {}).ok());
  const std::vector<uint8_t> expected = bytes.bytes();
  EXPECT_GT(fail_each("repack to a vendor's format", [&] { return repack(source.view, "ROWS", bytes.view, {}); },
                      [&] { EXPECT_EQ(bytes.bytes(), expected); }),
            0);
  const Tensor x = random_tensor(ElementType::f32, {20, 70}, random);
  Tensor out(ElementType::f32, {20, 40});
  ASSERT_TRUE(linear(x.view, bytes.view, 40, out.view, {}).ok());
  const std::vector<uint8_t> product = out.bytes();
  EXPECT_GT(fail_each("linear in a vendor's format", [&] { return linear(x.view, bytes.view, 40, out.view, {}); },
                      [&] { EXPECT_EQ(out.bytes(), product); }),
            0);
}

}  // namespace
}  // namespace lowbit::test
