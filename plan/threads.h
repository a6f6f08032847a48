// The threads of a plan's calls.
#pragma once

namespace lowbit {

struct Threads {
  // How many may work at once, at least 1.
  int count = 1;
  // Calls task(context, i) once for each i in [0, count), in any order, on any threads, and returns when all are done, like
  // Parallel::run of ops/parallel.h. Null: the library uses its own threads.
  void (*run)(void* host, int count, void (*task)(void* context, int index), void* context) = nullptr;
  void* host = nullptr;

  Threads(int own) : count(own) {}  // NOLINT: implicit, so that a number can be passed for the library's own threads
  Threads(int most, void (*by)(void*, int, void (*)(void*, int), void*), void* of) : count(most), run(by), host(of) {}
};

}  // namespace lowbit
