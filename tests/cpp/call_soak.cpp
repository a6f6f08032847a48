// Many threads call every operator concurrently, each with its own float settings, while kernel libraries are loaded. Every
// call must give the same bits, and memory must not grow. `races` runs it under ThreadSanitizer.
//
//   call_soak [CALLS [THREADS]]

#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "../../plan/team.h"
#include "support/build.h"
#include "support/calls.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

// One in this many calls uses several threads, because creating them is slow.
#ifdef __SANITIZE_THREAD__
constexpr int64_t kAlone = 8;
#else
constexpr int64_t kAlone = 64;
#endif

std::atomic<bool> right{true};

void expect(bool holds, const std::string& what, const char* message = "") {
  if (holds) return;
  std::fprintf(stderr, "%s %s\n", what.c_str(), message);
  right = false;
}

// Threads that start at the same time.
template <class Body>
void together(int count, const Body& body) {
  std::atomic<int> waiting{count};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A host whose threads start together, so that they overlap even on a busy machine.
Parallel at_once(int count) {
  return {count, [](int tasks, void (*task)(void*, int), void* context) {
            together(tasks, [=](int i) { task(context, i); });
          }};
}

// The kernel tables have not been used before, so one thread initializes them for all.
void first_use(int threads) {
  Random random(1);
  const Layout layout = layout_of(72, 112, 4, 32, Mapping::symmetric, true);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  const Tensor x = random_tensor(ElementType::f32, {3, 112}, random);
  std::vector<Tensor> out;
  for (int i = 0; i < threads; ++i) out.emplace_back(ElementType::f32, std::vector<int64_t>{3, 72});
  together(threads, [&](int i) {
    const Status status = linear(x.view, weight.view, 72, out[static_cast<size_t>(i)].view, {});
    expect(status.ok(), "the first call:", status.message());
  });
  const std::vector<uint8_t> expected = expected_linear(x.view, weight.memory->data(), layout);
  for (const Tensor& result : out) expect(result.bytes() == expected, "the first call gave different bits");
}

int64_t resident_kib() {
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  long long pages = 0, resident = 0;
  if (file == nullptr) return 0;
  if (std::fscanf(file, "%lld %lld", &pages, &resident) != 2) resident = 0;
  std::fclose(file);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

void work(const std::vector<Call>& calls, std::atomic<int64_t>& left, uint64_t seed) {
  constexpr int kRounding[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
  Random random(seed);
  std::vector<uint8_t> out;
  while (left.fetch_sub(1) > 0 && right) {
    const Call& call = calls[static_cast<size_t>(random.below(static_cast<int64_t>(calls.size())))];
    const Parallel parallel = random.below(kAlone) == 0 ? at_once(static_cast<int>(2 + random.below(3))) : Parallel();
    out.assign(call.expected.size(), 0);
    std::fesetround(kRounding[random.below(3)]);
    const Status status = call.run(parallel, out.data());
    std::fesetround(FE_TONEAREST);
    expect(status.ok(), call.name + ":", status.message());
    expect(out == call.expected, call.name + " gave different bits");
  }
}

// The threads of plans, which sleep between calls.
void work_in_teams(const std::vector<Call>& calls, int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> out;
  for (int64_t left = count; left > 0 && right;) {
    Team team(static_cast<int>(random.between(int64_t{1}, int64_t{4})));
    for (int64_t plans = random.below(20); plans > 0; --plans) {
      const Team::Awake awake(team);
      for (int64_t operators = random.below(8); operators > 0; --operators, --left) {
        const Call& call = calls[static_cast<size_t>(random.below(static_cast<int64_t>(calls.size())))];
        out.assign(call.expected.size(), 0);
        const Status status = call.run(awake.parallel(), out.data());
        expect(status.ok() && out == call.expected, call.name + " in a team:", status.message());
      }
    }
  }
}

// Kernels that do not change results: with the bits of the built-in ones, or for their own format.
void load(std::atomic<bool>& ends) {
  for (const char* name : {"own_format", "acme_kernels", "fault_after", "fault_no_rows", "own_format"}) {
    const Status status = load_kernels((std::string(kTestLibraries) + name + ".so").c_str());
    expect(status.ok() == (std::string(name) != "fault_no_rows"), std::string(name) + ":", status.message());
    std::this_thread::yield();
  }
  while (!ends) {
    for (size_t i = 0; i < linear_kernel_count(); ++i) expect(linear_kernel(i).run != nullptr, "a kernel without a function");
    std::this_thread::yield();
  }
}

int run(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : 20000;
  const int workers = argc > 2 ? std::atoi(argv[2]) : 4;
  first_use(workers);
  std::vector<Call> calls = make_calls();
  for (size_t i = calls.size(); i-- > 0;) {  // takes milliseconds each, on one thread
    if (calls[i].expected.size() > 100000 && i % 4 != 0) calls.erase(calls.begin() + static_cast<int64_t>(i));
  }
  std::atomic<bool> ends{false};
  std::thread loader(load, std::ref(ends));
  int64_t resident = 0;
  for (const int64_t part : {count / 10, count - count / 10}) {
    std::atomic<int64_t> left{part};
    resident = resident_kib();
    together(workers, [&](int i) {
      work(calls, left, static_cast<uint64_t>(part + i));
      work_in_teams(calls, part / (4 * workers), static_cast<uint64_t>(i));
    });
  }
  ends = true;
  loader.join();
  const int64_t grown = resident_kib() - resident;
  std::printf("%lld calls of %zu kinds on %d threads, memory grew by %lld KiB\n", static_cast<long long>(count),
              calls.size(), workers, static_cast<long long>(grown));
#ifndef __SANITIZE_THREAD__
  expect(grown < 8 << 10 || kSanitized, "memory grew after the first tenth of the calls");
#endif
  return right && !testing::Test::HasFailure() ? 0 : 1;
}

}  // namespace
}  // namespace lowbit::test

int main(int argc, char** argv) { return lowbit::test::run(argc, argv); }
