// The threads of PyTorch. Only for torch_ops.cpp.
#pragma once

#include <torch/csrc/stable/ops.h>

#ifdef __linux__
#include <dirent.h>
#include <pthread.h>

#include <atomic>
#endif

#include "parallel.h"

namespace lowbit {

#ifdef __linux__
// A forked process has only the forking thread. GNU's OpenMP, which torch uses on Linux, does not notice this: if the thread
// has used other threads before, it would wait for them forever. So it computes alone. Threads that start later are not
// affected.
inline std::atomic<bool> forks_with_threads{false}, alone_after_fork{false};
inline std::atomic<pthread_t> forked{};

// Without /proc, the number of threads is unknown.
inline bool has_threads() {
  DIR* const tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return true;
  int entries = 0;  // with "." and ".."
  while (entries <= 3 && readdir(tasks) != nullptr) ++entries;
  closedir(tasks);
  return entries != 3;
}

// Registration only fails without memory, and then torch's own operators wait in the same way.
[[maybe_unused]] inline const int watches_forks = pthread_atfork([] { forks_with_threads = has_threads(); }, nullptr, [] {
  if (forks_with_threads) alone_after_fork = true;
  forked = pthread_self();
});

inline bool computes_alone() {
  return alone_after_fork.load(std::memory_order_relaxed) && pthread_equal(forked, pthread_self()) != 0;
}
#else
inline bool computes_alone() { return false; }
#endif

inline Parallel torch_threads() {
  Parallel parallel;
  if (computes_alone()) return parallel;
  parallel.threads = static_cast<int>(torch::stable::get_num_threads());
  parallel.run = [](int count, void (*task)(void*, int), void* context) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(context, static_cast<int>(i));
    });
  };
  return parallel;
}

}  // namespace lowbit
