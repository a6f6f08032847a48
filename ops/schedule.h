// How operators share their work among the threads that a host provides (parallel.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "../kernels/isa.h"
#include "../kernels/vector_length.h"
#include "float_environment.h"
#include "parallel.h"
#include "sme_threads.h"

namespace lowbit {

// A thread's settings while it works for an operator: default float settings, and long vectors if a kernel may use Arm's matrix
// unit.
struct WorkingThread {
  const DefaultFloats floats;
  const LongVectors vectors;
  explicit WorkingThread(int worker) : vectors((active_isa() & kSme2) != 0 && worker < sme_threads()) {}
};

// Calls body(worker, begin, end) over [0, count) in pieces of up to `step`. Free threads claim the next piece, so a slow or
// busy core takes fewer pieces and does not delay the others. With one thread or one piece, everything runs on the caller's
// thread. `worker`, below parallel.threads, is unique for each thread of a call. Every body runs on a WorkingThread.
template <class Body>
void parallel_1d(const Parallel& parallel, int64_t count, int64_t step, const Body& body) {
  const int64_t pieces = (count + step - 1) / step;
  if (parallel.threads <= 1 || pieces <= 1) {
    const WorkingThread thread(0);
    if (count > 0) body(0, int64_t{0}, count);
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
      [](void* context, int worker) {
        const WorkingThread thread(worker);
        Work& shared = *static_cast<Work*>(context);
        for (;;) {
          const int64_t begin = shared.next.fetch_add(shared.step, std::memory_order_relaxed);
          if (begin >= shared.count) return;
          const int64_t end = begin + shared.step;
          (*shared.body)(worker, begin, end < shared.count ? end : shared.count);
        }
      },
      &work);
}

// Two stages over a table of rows x columns: every row is prepared once, and tiles are computed from prepared rows. Rows are
// grouped in bands: a band's tiles, each with some of the columns, only wait for the preparation of the band's rows.
struct Grid {
  int64_t rows, band_rows;  // the last band may have fewer rows
  int64_t prepare_rows;     // a claim of the first stage: at most this many rows of a band
  int64_t columns;
  int64_t least_columns, most_columns;  // a claim of the second stage: a multiple of the least, except for the last
  // Memory nodes (nodes.h), or threads (Parallel::part): each has a part of the columns, claimed before other parts.
  int64_t nodes = 1;
  int (*node_of)(int worker) = nullptr;  // with several nodes: the node of the calling thread

  // Start of a node's part of the columns.
  int64_t part(int64_t node) const { return node == nodes ? columns : columns / least_columns * node / nodes * least_columns; }
  int64_t bands() const { return (rows + band_rows - 1) / band_rows; }
  int64_t rows_of(int64_t band) const {
    const int64_t remaining = rows - band * band_rows;
    return remaining < band_rows ? remaining : band_rows;
  }
  // Size of the next claim if this many columns are left in all bands. Claims shrink towards the end (guided self-scheduling,
  // Polychronopoulos and Kuck, 1987), so that a slow core does not start a large claim when the others are nearly done.
  int64_t claim(int64_t remaining, int threads) const {
    const int64_t share = remaining / (2 * threads);
    if (share <= least_columns) return least_columns;
    return (share < most_columns ? share : most_columns) / least_columns * least_columns;
  }
};

// The unit that moves between the caches of two cores.
#ifdef __APPLE__
inline constexpr size_t kCacheLine = 128;
#else
inline constexpr size_t kCacheLine = 64;
#endif

// Shared progress of threads on a band, or on a node's part of it. With several nodes, the first part of a band includes its
// rows.
struct alignas(kCacheLine) Band {
  std::atomic<int64_t> claimed_rows{0}, prepared_rows{0}, claimed_columns{0};
};

// Calls prepare(worker, begin, end) over all rows and tile(worker, band, begin, end) over the columns of every band, in one
// parallel region. `worker` and claims are as above. With one thread or one tile, everything runs on the caller's thread.
// `bands`: one newly constructed Band for each part of each band.
template <class Prepare, class Tile>
void parallel_2d(const Parallel& parallel, const Grid& grid, Band* bands, const Prepare& prepare, const Tile& tile) {
  const int64_t count = grid.bands();
  const int64_t tiles = count * ((grid.columns + grid.least_columns - 1) / grid.least_columns);
  if (parallel.threads <= 1 || tiles <= 1) {
    if (tiles == 0) return;
    const WorkingThread thread(0);
    prepare(0, int64_t{0}, grid.rows);
    for (int64_t b = 0; b < count; ++b) tile(0, b, int64_t{0}, grid.columns);
    return;
  }
  const int threads = tiles < parallel.threads ? static_cast<int>(tiles) : parallel.threads;
  const int64_t nodes = grid.nodes;
  auto work = [&](int worker) {
    const WorkingThread thread(worker);
    for (int64_t b = 0; b < count; ++b) {
      Band& band = bands[b * nodes];
      const int64_t first = b * grid.band_rows, rows = grid.rows_of(b);
      for (;;) {
        const int64_t begin = band.claimed_rows.fetch_add(grid.prepare_rows, std::memory_order_relaxed);
        if (begin >= rows) break;
        const int64_t end = begin + grid.prepare_rows < rows ? begin + grid.prepare_rows : rows;
        prepare(worker, first + begin, first + end);
        band.prepared_rows.fetch_add(end - begin, std::memory_order_release);
      }
    }
    // Claims from the rest of a node's part of a band.
    const auto compute = [&](int64_t b, int64_t node) {
      const int64_t first = grid.part(node), columns = grid.part(node + 1) - first;
      std::atomic<int64_t>& claimed = bands[b * nodes + node].claimed_columns;
      int64_t begin = claimed.load(std::memory_order_relaxed);
      while (begin < columns) {
        const int64_t remaining = columns - begin;
        const int64_t wanted = grid.claim((remaining + (count - 1 - b) * columns) * nodes, threads);
        const int64_t end = begin + (wanted < remaining ? wanted : remaining);
        if (!claimed.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
        tile(worker, b, first + begin, first + end);
        begin = claimed.load(std::memory_order_relaxed);
      }
    };
    const int64_t own = nodes > 1 ? grid.node_of(worker) : 0;
    for (bool waits = true; waits;) {
      waits = false;
      for (int64_t turn = 0; turn < nodes; ++turn) {
        for (int64_t b = 0; b < count; ++b) {
          if (bands[b * nodes].prepared_rows.load(std::memory_order_acquire) < grid.rows_of(b)) {
            waits = true;
          } else {
            compute(b, (own + turn) % nodes);
          }
        }
      }
      if (waits) std::this_thread::yield();
    }
  };
  parallel.run(threads, [](void* context, int worker) { (*static_cast<decltype(work)*>(context))(worker); }, &work);
}

}  // namespace lowbit
