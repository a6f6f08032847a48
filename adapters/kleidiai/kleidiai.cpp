// Arm's KleidiAI as a kernel library of lowbit: its 4-bit kernels for dot-product and i8mm CPUs, with their own packed
// format, "KAI4": symmetric 4-bit weights, group sizes that are multiples of 32 and divide k.
//
// Differences from panel16: scales are bfloat16, and KleidiAI rounds activations differently, so results are close to lowbit's,
// not equal. The format cannot be unpacked, so there is no embedding lookup.

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include <kai/kai_common.h>
#include <kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod.h>
#include <kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm.h>
#include <kai/ukernels/matmul/matmul_clamp_f32_qai8dxp_qsi4c32p/kai_matmul_clamp_f32_qai8dxp_qsi4c32p_interface.h>
#include <kai/ukernels/matmul/pack/kai_lhs_quant_pack_qai8dxp_f32.h>
#include <kai/ukernels/matmul/pack/kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0.h>

#include <lowbit/kernels/library.h>

namespace {

using namespace lowbit;
using Ukernel = kai_matmul_clamp_f32_qai8dxp_qsi4c32p_ukernel;

#define UKERNEL(variant)                                                                                        \
  {kai_get_m_step_matmul_clamp_f32_##variant,            kai_get_n_step_matmul_clamp_f32_##variant,            \
   kai_get_mr_matmul_clamp_f32_##variant,                kai_get_nr_matmul_clamp_f32_##variant,                \
   kai_get_kr_matmul_clamp_f32_##variant,                kai_get_sr_matmul_clamp_f32_##variant,                \
   kai_get_lhs_packed_offset_matmul_clamp_f32_##variant, kai_get_rhs_packed_offset_matmul_clamp_f32_##variant, \
   kai_get_dst_offset_matmul_clamp_f32_##variant,        kai_get_dst_size_matmul_clamp_f32_##variant,          \
   kai_run_matmul_clamp_f32_##variant}
constexpr Ukernel kDot = UKERNEL(qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod);
constexpr Ukernel kMmla = UKERNEL(qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm);
#undef UKERNEL

constexpr Format kFormat = vendor_format("KAI4");

// Number of inputs that share a scale.
int64_t group_of(const Layout& layout) { return layout.group_size == 0 ? layout.k : layout.group_size; }

// KleidiAI ends the process on an unsupported size, so this checks sizes first.
bool is_held(const Layout& layout) {
  const int64_t group = group_of(layout);
  return layout.bits == 4 && layout.mapping == Mapping::symmetric && group % 32 == 0 && layout.k % group == 0;
}

int64_t bytes(const void*, const Layout& layout) {
  if (!is_held(layout)) return 0;
  return static_cast<int64_t>(kai_get_rhs_packed_size_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(
      static_cast<size_t>(layout.n), static_cast<size_t>(layout.k), kDot.get_nr(), kDot.get_kr(), kDot.get_sr(),
      static_cast<size_t>(group_of(layout)), kai_dt_bf16));
}

// Panels of nr rows are independent, so rows [begin, end) are packed as a separate matrix.
const char* pack(const void*, const Layout& layout, const PackArgs& args, int64_t begin, int64_t end, void* out) {
  const size_t first = static_cast<size_t>(begin), n = static_cast<size_t>(end - begin), k = static_cast<size_t>(layout.k);
  const size_t groups = static_cast<size_t>(layout.groups), group = static_cast<size_t>(group_of(layout));
  const std::unique_ptr<uint8_t[]> codes(new (std::nothrow) uint8_t[n * k / 2]);
  const std::unique_ptr<uint16_t[]> scales(new (std::nothrow) uint16_t[n * groups]);
  const std::unique_ptr<float[]> bias(new (std::nothrow) float[n]());
  if (codes == nullptr || scales == nullptr || bias == nullptr) return "there is not enough memory for a copy";
  const uint8_t* const from = args.codes + first * k;
  for (size_t i = 0; i < n * k / 2; ++i) codes[i] = static_cast<uint8_t>(from[2 * i] | from[2 * i + 1] << 4);
  for (size_t i = 0; i < n * groups; ++i) {
    scales[i] = bf16_from_f32(args.scales[first * groups + i]);
    if (!std::isfinite(f32_from_bf16(scales[i]))) return "a scale is out of bfloat16's range";
  }
  if (args.bias != nullptr) std::memcpy(bias.get(), args.bias + first, n * sizeof(float));
  kai_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0_params params{};
  params.lhs_zero_point = 1;
  params.rhs_zero_point = 8;
  params.scale_dt = kai_dt_bf16;
  kai_run_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0(1, n, k, kDot.get_nr(), kDot.get_kr(), kDot.get_sr(), group, codes.get(),
                                            k / 2, bias.get(), scales.get(), groups * sizeof(uint16_t),
                                            static_cast<char*>(out) + kDot.get_rhs_packed_offset(first, k, group), 0, &params);
  return nullptr;
}

template <const Ukernel& K>
int64_t activation_bytes(const void*, const Layout& layout, int64_t m) {
  return static_cast<int64_t>(kai_get_lhs_packed_size_lhs_quant_pack_qai8dxp_f32(
      static_cast<size_t>(m), static_cast<size_t>(layout.k), K.get_mr(), K.get_kr(), K.get_sr()));
}

template <const Ukernel& K>
void prepare(const PrepareArgs& args) {
  const size_t k = static_cast<size_t>(args.layout.k), begin = static_cast<size_t>(args.begin);
  char* const to = static_cast<char*>(args.activations) +
                   kai_get_lhs_packed_offset_lhs_quant_pack_qai8dxp_f32(begin, k, K.get_mr(), K.get_kr(), K.get_sr());
  kai_run_lhs_quant_pack_qai8dxp_f32(static_cast<size_t>(args.end) - begin, k, K.get_mr(), K.get_kr(), K.get_sr(), 0,
                                     static_cast<const float*>(args.x) + args.begin * args.x_stride,
                                     static_cast<size_t>(args.x_stride) * sizeof(float), to);
}

// Rows [row, row + m) times columns [column, column + n), into float32.
template <const Ukernel& K>
void multiply(const LinearArgs& args, int64_t row, int64_t m, int64_t column, int64_t n, float* out, int64_t stride) {
  constexpr float kLimit = std::numeric_limits<float>::infinity();
  const size_t k = static_cast<size_t>(args.layout.k), group = static_cast<size_t>(group_of(args.layout));
  K.run_matmul(static_cast<size_t>(m), static_cast<size_t>(n), k, group,
               static_cast<const char*>(args.activations) + K.get_lhs_packed_offset(static_cast<size_t>(row), k),
               args.panels + K.get_rhs_packed_offset(static_cast<size_t>(column), k, group), out,
               static_cast<size_t>(stride) * sizeof(float), sizeof(float), -kLimit, kLimit);
}

template <const Ukernel& K>
void run(const LinearArgs& args) {
  const int64_t begin = args.panel_begin * kPanelRows;
  const int64_t end = args.panel_end * kPanelRows < args.layout.n ? args.panel_end * kPanelRows : args.layout.n;
  if (begin >= end) return;
  if (args.out_dtype == DType::f32) {
    multiply<K>(args, 0, args.m, begin, end - begin, static_cast<float*>(args.out) + begin, args.out_stride);
    return;
  }
  constexpr int64_t kRows = 16;  // a multiple of the tile's rows
  for (int64_t row = 0; row < args.m; row += kRows) {
    const int64_t m = args.m - row < kRows ? args.m - row : kRows;
    for (int64_t column = begin; column < end; column += kPanelRows) {
      const int64_t n = end - column < kPanelRows ? end - column : kPanelRows;
      float tile[kRows * kPanelRows];
      multiply<K>(args, row, m, column, n, tile, kPanelRows);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          store_from_f32(args.out, args.out_dtype, (row + i) * args.out_stride + column + j, tile[i * kPanelRows + j]);
        }
      }
    }
  }
}

// Both kernels use the same packed form; their tiles are in the table below.
bool is_as_expected() {
  return kDot.get_nr() == kMmla.get_nr() && kDot.get_kr() == kMmla.get_kr() && kDot.get_sr() == kMmla.get_sr() &&
         kDot.get_nr() == 8 && kDot.get_mr() == 1 && kMmla.get_mr() == 4 && kDot.get_n_step() == 8 && kMmla.get_n_step() == 8 &&
         kDot.get_m_step() == 1 && kMmla.get_m_step() == 4;
}

// Activations have a scale and a zero point per row, weights have 8-bit scales. Rows are packed in panels of 8, the nr of both
// kernels.
constexpr PackedFormat kFormats[] = {{kFormat, bytes, pack, nullptr, 1.0f / 32, 8}};

template <const Ukernel& K>
constexpr LinearKernel row_of(const char* name, IsaBits isa, uint8_t m_least) {
  LinearKernel row{name, isa, kFormat, 4, m_least, 8, run<K>};
  row.activation_bytes = activation_bytes<K>;
  row.prepare = prepare<K>;
  return row;
}
constexpr IsaBits kDotBits = kNeon | kNeonDot;
constexpr LinearKernel kRows[] = {row_of<kMmla>("kleidiai_a8w4_4x8_i8mm", kDotBits | kI8mm, 4),
                                  row_of<kDot>("kleidiai_a8w4_1x8_neondot", kDotBits, 1)};

}  // namespace

extern "C" LOWBIT_API const KernelLibrary* lowbit_kernels(uint32_t abi) {
  static const KernelLibrary library = [] {
    KernelLibrary result;
    result.vendor = "kleidiai";
    result.linear = {kRows, sizeof kRows / sizeof kRows[0]};
    result.formats = {kFormats, 1};
    return result;
  }();
  return abi == kKernelAbi && is_as_expected() ? &library : nullptr;
}
