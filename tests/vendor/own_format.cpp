// A library with its own packed format, "ROWS": codes as bytes, row by row, then scales, mins, biases as float32.
// Its activations also stay float32, so results of its linear kernels differ from those of panel16.
// It has kernels only for widths 4 and 8.

#include <lowbit/kernels/library.h>

#include <cstring>

using namespace lowbit;

namespace {

struct Parts {
  int64_t codes, scales, mins, bias, end;  // offsets in bytes

  explicit Parts(const Layout& layout) {
    const int64_t per_group = layout.n * layout.groups * 4;
    codes = 0;
    scales = (layout.n * layout.k + 3) / 4 * 4;
    mins = scales + per_group;
    bias = mins + (layout.mapping == Mapping::affine ? per_group : 0);
    end = bias + (layout.has_bias ? layout.n * 4 : 0);
  }
};

// Supports only what tests need, which also shows how other cases are handled.
int64_t bytes(const void*, const Layout& layout) { return layout.k > 4096 || layout.n > 4096 ? 0 : Parts(layout).end; }

const char* pack(const void*, const Layout& layout, const PackArgs& args, int64_t begin, int64_t end, void* out) {
  const Parts at(layout);
  uint8_t* to = static_cast<uint8_t*>(out);
  if (args.scales[0] == 42.0f) return "its first scale is 42";  // an arbitrary vendor condition
  const auto copy = [&](int64_t at, const void* from, int64_t row_bytes) {
    std::memcpy(to + at + begin * row_bytes, static_cast<const char*>(from) + begin * row_bytes,
                static_cast<size_t>((end - begin) * row_bytes));
  };
  copy(at.codes, args.codes, layout.k);
  copy(at.scales, args.scales, layout.groups * 4);
  if (args.mins != nullptr) copy(at.mins, args.mins, layout.groups * 4);
  if (args.bias != nullptr) copy(at.bias, args.bias, 4);
  return nullptr;
}

const char* unpack(const void*, const Layout& layout, const void* from, int64_t begin, int64_t end, const UnpackArgs& args) {
  const Parts at(layout);
  const uint8_t* in = static_cast<const uint8_t*>(from);
  const auto copy = [&](void* to, int64_t at, int64_t row_bytes) {
    std::memcpy(static_cast<char*>(to) + begin * row_bytes, in + at + begin * row_bytes,
                static_cast<size_t>((end - begin) * row_bytes));
  };
  copy(args.codes, at.codes, layout.k);
  copy(args.scales, at.scales, layout.groups * 4);
  if (args.mins != nullptr) copy(args.mins, at.mins, layout.groups * 4);
  if (args.bias != nullptr) copy(args.bias, at.bias, 4);
  return nullptr;
}

float weight(const Layout& layout, const uint8_t* in, int64_t row, int64_t i) {
  const Parts at(layout);
  const int64_t group = row * layout.groups + i / layout.group_inputs();
  const int code = in[row * layout.k + i];
  const float scale = load_as_f32(in + at.scales, DType::f32, group);
  if (layout.mapping == Mapping::affine) {
    return scale * static_cast<float>(code) + load_as_f32(in + at.mins, DType::f32, group);
  }
  return scale * static_cast<float>(level_factor(layout.bits) * code - level_offset(layout.bits));
}

int64_t activation_bytes(const void*, const Layout& layout, int64_t m) { return m * layout.k * 4; }

// Reads activations of each type.
void prepare(const PrepareArgs& args) {
  for (int64_t i = args.begin; i < args.end; ++i) {
    for (int64_t j = 0; j < args.layout.k; ++j) {
      const float value = load_as_f32(args.x, args.x_dtype, i * args.x_stride + j);
      store_from_f32(args.activations, DType::f32, i * args.layout.k + j, value);
    }
  }
}

void linear(const LinearArgs& args) {
  const Layout& layout = args.layout;
  const int64_t end = args.panel_end * kPanelRows < layout.n ? args.panel_end * kPanelRows : layout.n;
  for (int64_t row = args.panel_begin * kPanelRows; row < end; ++row) {
    const float bias = layout.has_bias ? load_as_f32(args.panels + Parts(layout).bias, DType::f32, row) : 0.0f;
    for (int64_t i = 0; i < args.m; ++i) {
      double sum = 0.0;
      for (int64_t j = 0; j < layout.k; ++j) {
        sum += double{load_as_f32(args.activations, DType::f32, i * layout.k + j)} * weight(layout, args.panels, row, j);
      }
      store_from_f32(args.out, args.out_dtype, i * args.out_stride + row, static_cast<float>(sum + bias));
    }
  }
}

void embedding(const EmbeddingArgs& args) {
  for (int64_t i = 0; i < args.layout.k; ++i) {
    store_from_f32(args.out, args.out_dtype, i, weight(args.layout, args.panels, args.row, i));
  }
}

constexpr Format kRowsFormat = vendor_format("ROWS");
// Its activations are not rounded to int8.
const PackedFormat kFormats[] = {{kRowsFormat, bytes, pack, unpack, 1.0f / 64, 8}};
// The tile of 4 rows is the only one at 8 bits, so it must also take a single row.
constexpr LinearKernel row_of(const char* name, uint8_t bits, uint8_t m_least, uint8_t x_types) {
  LinearKernel row{name, kPortable, kRowsFormat, bits, m_least, 16, linear};
  row.x_types = x_types;
  row.activation_bytes = activation_bytes;
  row.prepare = prepare;
  return row;
}
const LinearKernel kLinear[] = {row_of("rows_linear_w4", 4, 1, 7), row_of("rows_linear_w8", 8, 4, 1)};
const EmbeddingKernel kEmbedding[] = {{"rows_embedding_w4", kPortable, kRowsFormat, 4, embedding}};

}  // namespace

extern "C" LOWBIT_API const KernelLibrary* lowbit_kernels(uint32_t) {
  static const KernelLibrary library = [] {
    KernelLibrary result;
    result.vendor = "rows";
    result.linear = {kLinear, 2};
    result.embedding = {kEmbedding, 1};
    result.formats = {kFormats, 1};
    return result;
  }();
  return &library;
}
