// Measures this machine's read bandwidth in bytes per second, the upper limit of every GEMV from memory. A pass reads a buffer
// once; each thread reads its own part, in a pattern that keeps enough cache lines in flight. For the Python module and the
// benchmarks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace lowbit {

constexpr int64_t kLine = 64;  // bytes

struct Part {
  const uint8_t* begin;
  int64_t bytes;  // of one stream; a multiple of 4 lines
};

// The order of reads: `streams` adjacent parts of the memory in turn, with prefetch this many bytes ahead (0: only the CPU's
// own prefetch). The fastest pattern depends on the CPU.
struct Pattern {
  int streams;
  int64_t ahead;
};
inline constexpr Pattern kPatterns[] = {{1, 0}, {2, 0}, {4, 0}, {1, 2048}, {2, 2048}, {4, 2048}, {8, 2048}};

// Reads 4 lines of each stream at a time, and returns a value that depends on every byte.
using ReadLoop = uint64_t (*)(Part part, Pattern pattern);

// One loop per register width. Not a template, because the compiler must know the target of each.
#define LOWBIT_READ_LOOP(NAME, TARGET, BYTES)                                       \
  TARGET inline uint64_t NAME(Part part, Pattern pattern) {                         \
    typedef uint64_t Vector __attribute__((vector_size(BYTES)));                    \
    Vector sums[4] = {};                                                            \
    for (int64_t i = 0; i < part.bytes; i += 4 * kLine) {                           \
      for (int stream = 0; stream < pattern.streams; ++stream) {                    \
        const uint8_t* lines = part.begin + stream * part.bytes + i;                \
        for (int line = 0; line < 4; ++line) {                                      \
          if (pattern.ahead > 0) __builtin_prefetch(lines + line * kLine + pattern.ahead); \
          for (int64_t offset = 0; offset < kLine; offset += BYTES) {               \
            Vector vector;                                                          \
            __builtin_memcpy(&vector, lines + line * kLine + offset, sizeof vector); \
            sums[line] ^= vector;                                                   \
          }                                                                         \
        }                                                                           \
      }                                                                             \
    }                                                                               \
    const Vector sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];                       \
    uint64_t word = 0;                                                              \
    for (size_t i = 0; i < BYTES / 8; ++i) word ^= sum[i];                          \
    return word;                                                                    \
  }

LOWBIT_READ_LOOP(read_128, , 16)
#if defined(__x86_64__)
LOWBIT_READ_LOOP(read_256, __attribute__((target("avx2"))), 32)
LOWBIT_READ_LOOP(read_512, __attribute__((target("avx512f"))), 64)
#endif
#undef LOWBIT_READ_LOOP

inline ReadLoop widest_read_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_512;
  if (__builtin_cpu_supports("avx2")) return read_256;
#endif
  return read_128;
}

// Runs work(thread) on all threads from a common start, and returns the seconds until the last has finished. If a thread cannot
// start, throws std::system_error after the started ones have ended.
template <class Work>
double seconds_together(int threads, Work work) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> waiting{threads};
  std::atomic<bool> all_started{true};
  std::vector<Clock::time_point> begins(static_cast<size_t>(threads)), ends(begins.size());
  const auto body = [&](int thread) {
    --waiting;
    while (waiting.load() > 0) {
    }
    if (!all_started) return;
    begins[static_cast<size_t>(thread)] = Clock::now();
    work(thread);
    ends[static_cast<size_t>(thread)] = Clock::now();
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads));
  try {
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
  } catch (...) {
    all_started = false;
    waiting = 0;
    for (std::thread& other : others) other.join();
    throw;
  }
  body(0);
  for (std::thread& other : others) other.join();
  const auto begin = *std::min_element(begins.begin(), begins.end());
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - begin).count();
}

// One pass in a pattern, in bytes per second.
inline double read_pass(const uint8_t* memory, int64_t bytes, int threads, Pattern pattern) {
  static std::atomic<uint64_t> sink;  // so that the loops are not optimized away
  const ReadLoop loop = widest_read_loop();
  const int64_t part = bytes / (threads * pattern.streams) / (4 * kLine) * (4 * kLine);
  const double seconds = seconds_together(threads, [&](int thread) {
    sink ^= loop({memory + thread * pattern.streams * part, part}, pattern);
  });
  return static_cast<double>(part * pattern.streams * threads) / seconds;
}

struct Bandwidth {
  double bytes_per_second;
  Pattern pattern;
};

// The best of `passes` passes in each pattern.
inline Bandwidth read_bandwidth(const uint8_t* memory, int64_t bytes, int threads, int passes) {
  Bandwidth best{};
  for (int pass = 0; pass < passes; ++pass) {
    for (const Pattern pattern : kPatterns) {
      const double speed = read_pass(memory, bytes, threads, pattern);
      if (speed > best.bytes_per_second) best = {speed, pattern};
    }
  }
  return best;
}

}  // namespace lowbit
