#include "team.h"

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifndef _WIN32
#include <unistd.h>
#endif

namespace lowbit {
namespace {

// The team of the thread that runs a plan, because Parallel::run cannot pass it as an argument.
thread_local Team* current = nullptr;
thread_local int number = 0;  // number of this thread in its team: 0 for the thread that runs the plan, 1 and above for helpers

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ __volatile__("yield");
#endif
}

// A waiting thread spins for about ten microseconds, longer than operators on one thread take in small models. After that it
// yields its core, because on a busy machine the thread that it waits for may have none.
class Wait {
 public:
  void operator()() {
    if (++spins_ < 400) pause_briefly();
    else std::this_thread::yield();
  }

 private:
  int spins_ = 0;
};

// How often a helper looks for a call before it sleeps.
constexpr int kRest = 1000;

int64_t process() {
#ifdef _WIN32
  return 0;
#else
  return getpid();
#endif
}

constexpr uint64_t kNextBits = 16, kCountBits = 16;
constexpr uint64_t next_of(uint64_t ticket) { return ticket & ((1u << kNextBits) - 1); }
constexpr uint64_t count_of(uint64_t ticket) { return ticket >> kNextBits & ((1u << kCountBits) - 1); }
constexpr uint64_t job_of(uint64_t ticket) { return ticket >> (kNextBits + kCountBits); }

}  // namespace

Team::Team(const Threads& threads)
    : soon_(threads.run == nullptr ? static_cast<size_t>(threads.count - 1) : 0), process_(process()), threads_(threads) {
  if (threads.run != nullptr) return;
  helpers_.reserve(static_cast<size_t>(threads.count - 1));
  try {
    for (int i = 1; i < threads.count; ++i) {
      helpers_.emplace_back([this, i] {
        number = i;
        help(soon_[static_cast<size_t>(i - 1)]);
      });
    }
  } catch (...) {
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  if (process() != process_) {
    // A forked process has only the thread that forked, which has run all tasks itself. The handles of the other threads may
    // now belong to threads that it has started since, so they are neither joined nor detached.
    new std::vector<std::thread>(std::move(helpers_));
    return;
  }
  state_.store(ended, std::memory_order_release);
  state_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

// Runs one unclaimed task; false if there is none. A task that is claimed keeps run() from returning, so the job's fields stay
// as they are until the task is done.
bool Team::claim_and_run() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (next_of(ticket) >= count_of(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  task_(context_, static_cast<int>(next_of(ticket)));
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

// Prefetches one cache line of each panel, so that the next job need not wait for long. The fields are read one by one and may
// belong to different jobs, which is harmless: any address may be prefetched.
bool Team::Soon::prefetch(const uint8_t** begun, int64_t* done) const {
  constexpr int64_t kMostBytes = 96 << 10;  // for each thread; a second-level cache has more
  const uint8_t* const at = begin.load(std::memory_order_relaxed);
  const int64_t step = bytes.load(std::memory_order_relaxed), count = panels.load(std::memory_order_relaxed);
  if (at != *begun) {
    *begun = at;
    *done = 0;
  }
  if (at == nullptr || *done >= step || *done * count >= kMostBytes) return false;
  for (int64_t panel = 0; panel < count; ++panel) __builtin_prefetch(at + panel * step + *done, 0, 2);
  *done += 64;
  return true;
}

void Team::help(const Soon& soon) {
  const uint8_t* begun = nullptr;  // the weights that are being prefetched
  int64_t done = 0;
  for (;;) {
    state_.wait(asleep, std::memory_order_acquire);
    Wait wait;
    // Waking takes longer than the work between two tokens, so a helper stays awake for a moment: about 0.2 ms.
    for (int rest = kRest; rest > 0;) {
      const uint32_t state = state_.load(std::memory_order_acquire);
      if (state == ended) return;
      rest = state == asleep ? rest - 1 : kRest;
      if (claim_and_run()) wait = Wait();
      else if (!soon.prefetch(&begun, &done)) wait();
    }
  }
}

void Team::run(int count, void (*task)(void* context, int index), void* context) {
  if (threads_.run != nullptr) return threads_.run(threads_.host, count, task, context);
  task_ = task;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t job = job_of(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store(job << (kNextBits + kCountBits) | static_cast<uint64_t>(count) << kNextBits, std::memory_order_release);
  if (next_ != nullptr) {
    for (Soon& soon : soon_) {
      soon.begin.store(next_->begin, std::memory_order_relaxed);
      soon.bytes.store(next_->bytes, std::memory_order_relaxed);
      soon.panels.store(next_->panels, std::memory_order_relaxed);
      ++next_;
    }
    next_ = nullptr;
  }
  while (claim_and_run()) {
  }
  for (Wait wait; done_.load(std::memory_order_acquire) != count;) wait();
}

Team::Awake::Awake(Team& team) : team_(team), earlier_(current) {
  current = &team;
  if (team.helpers_.empty()) return;
  team.state_.store(awake, std::memory_order_release);
  team.state_.notify_all();
}

Team::Awake::~Awake() {
  current = earlier_;
  if (!team_.helpers_.empty()) team_.state_.store(asleep, std::memory_order_release);
}

Parallel Team::Awake::parallel() const {
  Parallel result{team_.threads(),
                  [](int count, void (*task)(void*, int), void* context) { current->run(count, task, context); }};
  if (!team_.helpers_.empty()) result.part = [](int) { return number; };
  return result;
}

}  // namespace lowbit
