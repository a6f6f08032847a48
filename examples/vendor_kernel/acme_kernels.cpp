// A vendor's kernel: 4-bit linear layers on panel16 weights, in C++ that compilers vectorize for any CPU.
//
// It sums a * code with unsigned codes, and subtracts the 8 of "code - 8" once per segment of inputs, using the sum of the
// segment's activations that the caller provides.

#include <lowbit/kernels/library.h>

#include <atomic>
#include <cmath>
#include <cstring>

namespace {

using namespace lowbit;

std::atomic<uint64_t> calls{0};

constexpr int64_t kSegmentHalves = kSegmentInputs / kHalfInputs;

// Adds the products of 16 inputs: 4 lines of 16 rows x 4 inputs, all in the low or all in the high half of their bytes.
template <int Shift>
void add_half(const uint8_t* lines, const int8_t* a, int32_t (&sums)[kPanelRows]) {
  for (int line = 0; line < 4; ++line) {
    for (int r = 0; r < kPanelRows; ++r) {
      const uint8_t* bytes = lines + line * kLineBytes + 4 * r;
      for (int i = 0; i < 4; ++i) sums[r] += (bytes[i] >> Shift & 15) * a[4 * line + i];
    }
  }
}

void times_panel(const LinearArgs& args, const uint8_t* panel, int64_t row, int64_t first_column, int64_t columns) {
  const Layout& layout = args.layout;
  const bool affine = layout.mapping == Mapping::affine;
  const int8_t* a = args.a + row * layout.blocks * kBlockInputs;
  const float* scale = args.scales + row * layout.segments;
  const int32_t* a_sum = args.sums + row * layout.segments;
  const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
  const int64_t group_halves = layout.group_inputs() / kHalfInputs;

  float acc[kPanelRows] = {};
  for (int64_t group = 0, half = 0; group < layout.groups; ++group) {
    const int64_t group_end = half + group_halves < halves ? half + group_halves : halves;
    // The order and the rounding of these steps are the contract (ukernel.h): all kernels return the same bits.
    float products[kPanelRows];
    for (bool first = true; half < group_end; first = false, ++scale, ++a_sum) {
      const int64_t end = half + kSegmentHalves < group_end ? half + kSegmentHalves : group_end;
      int32_t sums[kPanelRows] = {};
      for (; half < end; ++half) {
        const uint8_t* block = panel + layout.block_offset(half / 2);
        const int8_t* inputs = a + half * kHalfInputs;
        half % 2 == 0 ? add_half<0>(block, inputs, sums) : add_half<4>(block, inputs, sums);
      }
      for (int r = 0; r < kPanelRows; ++r) {
        const float sum = static_cast<float>(affine ? sums[r] : sums[r] - 8 * *a_sum);
        products[r] = first ? *scale * sum : std::fma(*scale, sum, products[r]);
      }
    }
    const uint8_t* scales = panel + layout.scales_offset(group);
    for (int r = 0; r < kPanelRows; ++r) {
      acc[r] = std::fma(load_as_f32(scales, DType::f16, r), products[r], acc[r]);
      if (!affine) continue;
      const float group_sum = args.group_sums[row * layout.groups + group];
      acc[r] = std::fma(load_as_f32(scales, DType::f16, kPanelRows + r), group_sum, acc[r]);
    }
  }
  float head[3 * kPanelRows];  // row scales, row sums (not used), biases
  std::memcpy(head, panel + layout.head_offset, sizeof head);
  for (int64_t r = 0; r < columns; ++r) {
    const float y = std::fma(head[r], acc[r], head[2 * kPanelRows + r]);
    store_from_f32(args.out, args.out_dtype, row * args.out_stride + first_column + r, y);
  }
}

void linear(const LinearArgs& args) {
  calls.fetch_add(1, std::memory_order_relaxed);
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * args.layout.panel_bytes;
    const int64_t left = args.layout.n - p * kPanelRows;
    for (int64_t row = 0; row < args.m; ++row) {
      times_panel(args, panel, row, p * kPanelRows, left < kPanelRows ? left : kPanelRows);
    }
  }
}

// kPortable, because this file is compiled without ISA flags. A kernel with intrinsics names its ISA, for example kAvx2 or
// kNeonDot.
const LinearKernel kRows[] = {{"acme_linear_a8w4", kPortable, Format::panel16, 4, 1, 16, linear}};

}  // namespace

// For the test: how often the kernel ran.
extern "C" LOWBIT_API uint64_t acme_calls() { return calls.load(); }

extern "C" LOWBIT_API const KernelLibrary* lowbit_kernels(uint32_t abi) {
  static const KernelLibrary library = [] {
    KernelLibrary result;
    result.vendor = "acme";
    result.preference = Preference::before_built_in;  // so that the example runs; leave this out for a slower kernel
    result.linear = {kRows, sizeof kRows / sizeof kRows[0]};
    return result;
  }();
  return abi == kKernelAbi ? &library : nullptr;
}
