// Threads are an argument of the operators: each host provides its own.
#pragma once

namespace lowbit {

// Default: only the caller's thread.
struct Parallel {
  // Number of threads that may work at once, at least 1.
  int threads = 1;
  // Calls task(context, i) once for each i in [0, count), in any order, on any threads, and returns when all are done. `count`
  // is at most `threads`. Tasks do not throw, and do not wait for tasks that have not started. A host's thread pool must be a
  // variable of the host, because there is no pointer to it here.
  void (*run)(int count, void (*task)(void* context, int index), void* context) = nullptr;
  // If the host always uses the same threads: the number of the calling thread, from 0 to threads - 1. Each thread begins with
  // its own part of the weights, which it reads without gaps, and which it may have begun to read before the call.
  int (*part)(int index) = nullptr;
};

}  // namespace lowbit
