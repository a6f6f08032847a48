// Threads are an argument of the operator bodies: each host framework lends its own.
#pragma once

#include <atomic>
#include <cstdint>

namespace lowbit {

struct Parallel {
  // How many threads may work at once, at least 1.
  int threads = 1;
  // Calls task(context, i) once for each i in [0, count), in any order, on any threads, and returns when all are done.
  void (*run)(int count, void (*task)(void* context, int index), void* context) = nullptr;
};

// Calls body(begin, end) over [0, count) in pieces of up to `step`. Threads claim the next piece when they are free, so a
// slow or busy core takes fewer of them and does not hold up the rest. With one thread or one piece, all of it runs on
// the caller's thread.
template <class Body>
void parallel_1d(const Parallel& parallel, int64_t count, int64_t step, const Body& body) {
  const int64_t pieces = (count + step - 1) / step;
  if (parallel.threads <= 1 || pieces <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  struct Work {
    std::atomic<int64_t> next{0};
    int64_t count, step;
    const Body* body;
  } work;
  work.count = count;
  work.step = step;
  work.body = &body;
  const int tasks = pieces < parallel.threads ? static_cast<int>(pieces) : parallel.threads;
  parallel.run(
      tasks,
      [](void* context, int) {
        Work& shared = *static_cast<Work*>(context);
        for (;;) {
          const int64_t begin = shared.next.fetch_add(shared.step, std::memory_order_relaxed);
          if (begin >= shared.count) return;
          const int64_t end = begin + shared.step;
          (*shared.body)(begin, end < shared.count ? end : shared.count);
        }
      },
      &work);
}

}  // namespace lowbit
