// How operator calls are divided among threads.
#pragma once

#include <cstdint>

#include "../kernels/ukernel.h"

namespace lowbit {

// Below this many products a second thread costs more than it saves (a parallel region is 0.7 to 0.9 us).
inline constexpr int64_t kParallelProducts = 1 << 17;
// The same for this many values to quantize or dequantize.
inline constexpr int64_t kParallelValues = 1 << 15;
// A claim of rows to quantize, or of positions to write to a cache, is about this many values.
inline constexpr int64_t kClaimValues = 1 << 13;
// A claim of panels, or of rows of queries, is at least about this many products, so that the cost of claiming is small.
inline constexpr int64_t kClaimProducts = 1 << 14;
// A kernel for many rows prepares the activations of a claim once, for at most this many panels.
inline constexpr int64_t kClaimPanels = 8;
// The activations of a band stay in a cache while the weights are read once per band. Kernels unpack a panel once for
// `kBandRows` rows or more, so bands have about a multiple of them. On x86 a band may exceed a second-level cache: on Zen 4,
// 128 rows of 14336 inputs were 1.2 times faster in bands of 2 MiB than of 256 KiB. On Arm that cache is usually smaller.
#if defined(__x86_64__)
inline constexpr int64_t kBandBytes = 2 << 20;
#else
inline constexpr int64_t kBandBytes = 256 << 10;
#endif
inline constexpr int64_t kBandRows = 32;
// The desired number of tiles per thread; with few panels, bands get shorter.
inline constexpr int64_t kTilesPerThread = 8;

constexpr int64_t at_least_1(int64_t value) { return value < 1 ? 1 : value; }

// The smallest multiple of `unit` that is at least `value`.
constexpr int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Number of panels that a kernel computes at once; claims are multiples of it.
constexpr int64_t panels_at_once(const LinearKernel& kernel) { return at_least_1(kernel.n_step / kPanelRows); }

// Whether `panels` panels are divided at multiples of the number that the kernel computes at once. Interleaved panels are read
// faster, but an idle thread would lose more time.
constexpr bool cut_at_multiples(const LinearKernel& kernel, int64_t panels, int threads) {
  return !kernel.several_streams || panels >= panels_at_once(kernel) * threads;
}

}  // namespace lowbit
