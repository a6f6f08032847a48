#include <cstdlib>
#include <memory>

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"

namespace lowbit {
namespace {

// Below this many products a second thread costs more than it saves (a parallel region is 0.7 to 0.9 us).
constexpr int64_t kParallelProducts = 1 << 17;
// Activations are quantised on the caller's thread up to this many values.
constexpr int64_t kParallelValues = 1 << 15;
// A claim of panels is about this many products: short enough to balance, long enough to amortise the claim.
constexpr int64_t kTileProducts = 1 << 16;
// A kernel for many rows prepares the activations once for so many panels: a claim has as many, as long as every thread
// has 8 claims to balance.
constexpr int64_t kSharedPanels = 8;
// Rows of m that are quantised at once take about this much memory.
constexpr int64_t kScratchBytes = 4 << 20;

// One allocation for the quantised activations of a chunk of rows; small ones stay on the stack.
class Scratch {
 public:
  bool reserve(int64_t bytes) {
    if (bytes <= static_cast<int64_t>(sizeof local_)) {
      data_ = local_;
      return true;
    }
    heap_.reset(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
    data_ = heap_.get();
    return data_ != nullptr;
  }
  void* data() { return data_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  alignas(64) unsigned char local_[16384];
  std::unique_ptr<void, Free> heap_;
  void* data_ = nullptr;
};

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
  const LinearKernel& kernel = choose_linear(layout.format, layout.bits, rows, isa);
  const Parallel alone;

  const int64_t row_bytes = Quantized::bytes(1, layout);
  const int64_t chunk_limit = kScratchBytes / row_bytes < 64 ? 64 : kScratchBytes / row_bytes;
  const int64_t chunk = rows < chunk_limit ? rows : chunk_limit;
  Scratch scratch;
  const int64_t gather_bytes = x.stride[last] != 1 ? aligned(layout.k * element_bytes(x.type)) : 0;
  const int64_t scratch_bytes = Quantized::bytes(chunk, layout);
  const int64_t gathers = gather_bytes == 0 ? 0 : chunk;
  if (!scratch.reserve(scratch_bytes + gathers * gather_bytes)) {
    return Status::no_memory("no memory for %" PRId64 " bytes of quantised activations",
                             scratch_bytes + gathers * gather_bytes);
  }
  const Quantized quantized(scratch.data(), chunk, layout);
  char* gathered = static_cast<char*>(scratch.data()) + scratch_bytes;

  LinearArgs args{};
  args.panels = static_cast<const uint8_t*>(packed.data) + kHeaderBytes;
  args.layout = layout;
  args.a = quantized.a;
  args.group_sums = quantized.group_sums;
  args.scales = quantized.scales;
  args.zeros = quantized.zeros;
  args.out_dtype = dtype_of(out.type);
  args.out_stride = layout.n;

  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t m = rows - begin < chunk ? rows - begin : chunk;
    parallel_1d(m * layout.k < kParallelValues ? alone : parallel, m, 1 + kParallelValues / 4 / layout.k,
                [&](int64_t first, int64_t end) {
                  for (int64_t i = first; i < end; ++i) {
                    quantize_row(quantize, x, begin + i, i, layout, quantized, gathered + i * gather_bytes);
                  }
                });

    args.m = m;
    args.out = static_cast<char*>(out.data) + begin * layout.n * element_bytes(out.type);
    const int64_t panel_products = m * layout.k * kPanelRows;
    const int64_t balanced = layout.panels / (int64_t{8} * parallel.threads);
    const int64_t shared = balanced < kSharedPanels ? balanced : kSharedPanels;
    const int64_t step = 1 + kTileProducts / panel_products;
    parallel_1d(panel_products * layout.panels < kParallelProducts ? alone : parallel, layout.panels,
                step < shared ? shared : step, [&](int64_t first, int64_t end) {
                  LinearArgs tile = args;
                  tile.panel_begin = first;
                  tile.panel_end = end;
                  kernel.run(tile);
                });
  }
  return {};
}

}  // namespace lowbit
