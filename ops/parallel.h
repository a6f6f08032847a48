// Threads are an argument of the operators: each host lends its own.
#pragma once

namespace lowbit {

// By itself: the caller's thread alone.
struct Parallel {
  // How many threads may work at once, at least 1.
  int threads = 1;
  // Calls task(context, i) once for each i in [0, count), in any order, on any threads, and returns when all are done.
  // `count` is at most `threads`. A task throws nothing, and waits for no other that has not begun. A host's pool of
  // threads is a variable of the host's: there is nothing here to point to it.
  void (*run)(int count, void (*task)(void* context, int index), void* context) = nullptr;
};

}  // namespace lowbit
