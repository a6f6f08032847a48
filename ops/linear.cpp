#include <new>

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "scratch.h"

namespace lowbit {
namespace {

// Below this many products a second thread costs more than it saves (a parallel region is 0.7 to 0.9 us).
constexpr int64_t kParallelProducts = 1 << 17;
// Up to this many activations are quantised before threads are asked for.
constexpr int64_t kParallelValues = 1 << 15;
// Each claim of rows to quantise is about this many values.
constexpr int64_t kClaimValues = 1 << 13;
// A claim of panels is at least about this many products: fewer are not worth the claim.
constexpr int64_t kClaimProducts = 1 << 14;
// A kernel for many rows prepares the activations of a claim once, for up to so many panels.
constexpr int64_t kClaimPanels = 8;
// The activations of a band stay in a cache while the weights stream past them, once per band; kernels unpack a panel once
// for so many rows or more, so bands have about a multiple of them. On x86 a band may fill a second-level cache and more:
// there 128 rows of 14336 inputs were 1.2 times faster in bands of 2 MiB than of 256 KiB (Zen 4). On Arm that cache is
// smaller as a rule.
#if defined(__x86_64__)
constexpr int64_t kBandBytes = 2 << 20;
#else
constexpr int64_t kBandBytes = 256 << 10;
#endif
constexpr int64_t kBandRows = 32;
// So many tiles per thread, if there can be: bands get shorter when there are few panels.
constexpr int64_t kTilesPerThread = 8;
// Rows of m that are quantised at once take up to about this much memory; more of them need another parallel region.
constexpr int64_t kScratchBytes = 24 << 20;

constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Quantized {
  int8_t* a;
  int32_t* group_sums;
  float* scales;
  float* zeros;

  static int64_t bytes(int64_t m, const Layout& layout) {
    return aligned(m * layout.blocks * kBlockInputs) + aligned(m * layout.groups * 4) + 2 * aligned(m * 4);
  }

  Quantized(void* memory, int64_t m, const Layout& layout) {
    char* at = static_cast<char*>(memory);
    a = reinterpret_cast<int8_t*>(at);
    at += aligned(m * layout.blocks * kBlockInputs);
    group_sums = reinterpret_cast<int32_t*>(at);
    at += aligned(m * layout.groups * 4);
    scales = reinterpret_cast<float*>(at);
    zeros = reinterpret_cast<float*>(at + aligned(m * 4));
  }
};

// linear() on a row that prepares activations in a form of its own. `rows` of x, all checked.
Status linear_prepared(const LinearKernel& kernel, const TensorView& x, const uint8_t* panels, const Layout& layout,
                       int64_t rows, const TensorView& out, const Parallel& parallel) {
  const int last = x.shape.ndim - 1;
  const DType dtype = dtype_of(x.type);
  const int64_t row_bytes = layout.k * static_cast<int64_t>(sizeof(float));
  int64_t chunk = kScratchBytes / row_bytes / kBandRows * kBandRows;
  chunk = rows < kBandRows ? rows : chunk < kBandRows ? kBandRows : rows < chunk ? rows : chunk;
  const int64_t activation_bytes = kernel.activation_bytes(layout, chunk);
  if (activation_bytes < 1) {
    return Status::error("kernel '%s' wants %" PRId64 " bytes for %" PRId64 " rows of activations; expected 1 or more",
                         kernel.name, activation_bytes, chunk);
  }
  const Parallel threads = rows * layout.k * layout.n < kParallelProducts ? Parallel() : parallel;
  const int64_t float_bytes = aligned(chunk * row_bytes);
  const int64_t bytes = aligned(activation_bytes) + float_bytes + threads.threads * kLinearScratchBytes;
  const Scratch memory(bytes);
  if (memory.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of activations", bytes);
  float* const floats = reinterpret_cast<float*>(memory.data() + aligned(activation_bytes));
  char* const kernel_scratch = memory.data() + aligned(activation_bytes) + float_bytes;
  const int64_t rows_per_claim = (1 + kClaimValues / layout.k / kernel.m_least) * kernel.m_least;
  const int64_t panels_per_claim = 1 + kClaimProducts / (layout.k * kPanelRows);

  for (int64_t first = 0; first < rows; first += chunk) {
    LinearArgs args{};
    args.panels = panels;
    args.layout = layout;
    args.m = rows - first < chunk ? rows - first : chunk;
    args.out = static_cast<char*>(out.data) + first * layout.n * element_bytes(out.type);
    args.out_dtype = dtype;
    args.out_stride = layout.n;
    args.activations = memory.data();
    parallel_1d(threads, args.m, rows_per_claim, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* row = static_cast<const char*>(x.data) + element_bytes(x.type) * offset_of(x, last, first + i);
        for (int64_t j = 0; j < layout.k; ++j) floats[i * layout.k + j] = load_as_f32(row, dtype, j * x.stride[last]);
      }
      kernel.prepare({floats, layout.k, layout, args.m, begin, end, memory.data()});
    });
    parallel_1d(threads, layout.panels, panels_per_claim, [&](int worker, int64_t begin, int64_t end) {
      LinearArgs tile = args;
      tile.scratch = kernel_scratch + worker * kLinearScratchBytes;
      tile.panel_begin = begin;
      tile.panel_end = end;
      kernel.run(tile);
    });
  }
  return {};
}

// How the rows and panels of a call are cut, for `threads` threads.
Grid make_grid(int64_t rows, const Layout& layout, int threads) {
  const auto at_least_1 = [](int64_t value) { return value < 1 ? int64_t{1} : value; };
  const auto whole_chunks = [&](int64_t value) { return at_least_1(value / kBandRows) * kBandRows; };
  const int64_t cached = whole_chunks(kBandBytes / (layout.blocks * kBlockInputs));
  const int64_t balanced = whole_chunks(rows * layout.panels / (kTilesPerThread * threads));
  Grid grid{};
  const int64_t most = cached < balanced ? cached : balanced;
  const int64_t bands = (rows + most - 1) / most;
  grid.rows = rows;
  grid.band_rows = (rows + bands - 1) / bands;  // equal bands: no last one of a row or two that pays for all unpacking
  grid.prepare_rows = at_least_1(kClaimValues / layout.k);
  grid.columns = layout.panels;
  const int64_t panel_products = grid.rows_of(0) * layout.k * kPanelRows;
  grid.least_columns = 1 + kClaimProducts / panel_products;
  grid.most_columns = grid.least_columns < kClaimPanels ? kClaimPanels : grid.least_columns;
  return grid;
}

void quantize_row(const QuantizeKernel& kernel, const TensorView& x, int64_t row, int64_t index, const Layout& layout,
                  const Quantized& q, char* gathered) {
  const int last = x.shape.ndim - 1;
  const int64_t item = element_bytes(x.type);
  const char* source = static_cast<const char*>(x.data) + item * offset_of(x, last, row);
  if (x.stride[last] != 1 && layout.k > 1) {
    for (int64_t i = 0; i < layout.k; ++i) {
      std::memcpy(gathered + i * item, source + i * item * x.stride[last], static_cast<size_t>(item));
    }
    source = gathered;
  }
  QuantizeArgs args{};
  args.x = source;
  args.x_dtype = dtype_of(x.type);
  args.k = layout.k;
  args.k_padded = layout.blocks * kBlockInputs;
  args.group_inputs = layout.group_inputs();
  args.a = q.a + index * args.k_padded;
  args.group_sums = q.group_sums + index * layout.groups;
  args.scale = q.scales + index;
  args.zero = q.zeros + index;
  kernel.run(args);
}

}  // namespace

Status read_packed(const TensorView& packed, Layout* layout) {
  if (Status status = check_on_cpu("packed_weight", packed); !status.ok()) return status;
  if (packed.type != ElementType::u8 || packed.shape.ndim != 1) {
    return Status::error("packed_weight has dtype %s and shape %s; expected uint8 and one dimension",
                         name_of(packed.type), describe(packed.shape).text);
  }
  if (!packed.is_contiguous()) return Status::error("packed_weight is not contiguous");
  return read_header(packed.data, packed.shape.size[0], layout);
}

Status linear_shape(const TensorView& x, int64_t out_features, Shape* out) {
  if (x.shape.ndim < 1) return Status::error("x has no dimensions; expected [..., in_features]");
  if (out_features < 1) return Status::error("out_features is %" PRId64 "; expected 1 or more", out_features);
  *out = x.shape;
  out->size[out->ndim - 1] = out_features;
  return {};
}

Status linear(const TensorView& x, const TensorView& packed, int64_t out_features, const TensorView& out,
              const Parallel& parallel) {
  Layout layout;
  if (Status status = read_packed(packed, &layout); !status.ok()) return status;
  Shape out_shape;
  if (Status status = linear_shape(x, out_features, &out_shape); !status.ok()) return status;
  if (Status status = check_on_cpu("x", x); !status.ok()) return status;
  if (!is_activation_type(x.type)) {
    return Status::error("x has dtype %s; expected float32, bfloat16 or float16", name_of(x.type));
  }
  if (out_features != layout.n) {
    return Status::error("out_features is %" PRId64 "; expected %" PRId64 ", the rows of the packed weight", out_features,
                         layout.n);
  }
  const int last = x.shape.ndim - 1;
  if (x.shape.size[last] != layout.k) {
    return Status::error("x has shape %s; expected [..., %" PRId64 "], the inputs of the packed weight",
                         describe(x.shape).text, layout.k);
  }
  if (Status status = check_tensor("out", out, x.type, out_shape); !status.ok()) return status;

  const int64_t rows = x.shape.numel() / layout.k;
  if (rows == 0) return {};

  const IsaBits isa = active_isa();
  const QuantizeKernel& quantize = choose_quantize(isa);
  const LinearKernel& kernel = choose_linear(layout, rows, isa);
  if (kernel.run == nullptr) return no_kernel("linear", layout);
  const uint8_t* const panels = static_cast<const uint8_t*>(packed.data) + kHeaderBytes;
  if (kernel.prepare != nullptr) return linear_prepared(kernel, x, panels, layout, rows, out, parallel);

  const int64_t limit = kScratchBytes / Quantized::bytes(1, layout);
  const int64_t chunk = rows <= limit ? rows : limit < kBandRows ? kBandRows : limit / kBandRows * kBandRows;
  const int64_t products = chunk * layout.k * layout.panels * kPanelRows;
  const int threads = products < kParallelProducts ? 1 : parallel.threads;
  const int64_t quantized_bytes = Quantized::bytes(chunk, layout);
  Grid grid = make_grid(chunk, layout, threads);
  const int64_t bands_bytes = grid.bands() * static_cast<int64_t>(sizeof(Band));
  const int64_t gather_bytes = x.stride[last] != 1 ? aligned(layout.k * element_bytes(x.type)) : 0;
  const int64_t bytes = quantized_bytes + bands_bytes + threads * (kLinearScratchBytes + gather_bytes);
  const Scratch scratch(bytes);
  if (scratch.data() == nullptr) {
    return Status::no_memory("no memory for %" PRId64 " bytes of quantised activations", bytes);
  }
  const Quantized quantized(scratch.data(), chunk, layout);
  char* const band_memory = scratch.data() + quantized_bytes;
  char* const kernel_scratch = band_memory + bands_bytes;
  char* const gathered = kernel_scratch + threads * kLinearScratchBytes;

  LinearArgs args{};
  args.panels = panels;
  args.layout = layout;
  args.out_dtype = dtype_of(out.type);
  args.out_stride = layout.n;

  for (int64_t begin = 0; begin < rows; begin += chunk) {
    grid.rows = rows - begin < chunk ? rows - begin : chunk;
    Band* const bands = new (band_memory) Band[static_cast<size_t>(grid.bands())];
    const auto quantize_rows = [&](int worker, int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) {
        quantize_row(quantize, x, begin + i, i, layout, quantized, gathered + worker * gather_bytes);
      }
    };
    const bool few = grid.rows * layout.k < kParallelValues;
    if (few) quantize_rows(0, 0, grid.rows);
    parallel_2d({threads, parallel.run}, grid, bands,
                [&](int worker, int64_t first, int64_t end) {
                  if (!few) quantize_rows(worker, first, end);
                },
                [&](int worker, int64_t band, int64_t first_panel, int64_t end_panel) {
                  const int64_t first = band * grid.band_rows;
                  LinearArgs tile = args;
                  tile.scratch = kernel_scratch + worker * kLinearScratchBytes;
                  tile.m = grid.rows_of(band);
                  tile.a = quantized.a + first * layout.blocks * kBlockInputs;
                  tile.group_sums = quantized.group_sums + first * layout.groups;
                  tile.scales = quantized.scales + first;
                  tile.zeros = quantized.zeros + first;
                  tile.out = static_cast<char*>(out.data) + (begin + first) * layout.n * element_bytes(out.type);
                  tile.panel_begin = first_panel;
                  tile.panel_end = end_panel;
                  kernel.run(tile);
                });
  }
  return {};
}

}  // namespace lowbit
