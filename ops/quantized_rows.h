// Activations in the form that linear kernels read, and the addition of the results of two planes.
#pragma once

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "rotate.h"
#include "rows.h"

namespace lowbit {

// The properties that determine the content and the size of quantized rows.
struct RowKind {
  int64_t rotated_inputs, group_inputs, groups, segments;
  int planes;       // int8 rows for each row of x
  bool group_sums;  // whether a matrix reads them
};

// The kinds that the matrices of a call need. All of them have k inputs.
struct RowKinds {
  RowKind of[kMostMatrices];
  int count = 0;
  int64_t k = 0, blocks = 0;
  int most_planes = 1;
  bool rotated = false;  // whether a matrix has rotated inputs

  // Returns the kind for a matrix, and adds it if it is new.
  int add(const Layout& layout) {
    k = layout.k;
    blocks = layout.blocks;
    int kind = 0;
    while (kind < count && (of[kind].group_inputs != layout.group_inputs() ||
                            of[kind].rotated_inputs != layout.rotated_inputs() || of[kind].planes != layout.planes())) {
      ++kind;
    }
    if (kind == count) {
      of[count++] = {layout.rotated_inputs(), layout.group_inputs(), layout.groups, layout.segments, layout.planes(), false};
    }
    rotated |= layout.rotation != 0;
    if (layout.planes() > most_planes) most_planes = layout.planes();
    of[kind].group_sums |= has_mins(layout.mapping);
    return kind;
  }
};

// Some rows of x in the form that kernels read, of every kind. With two planes row i of x becomes rows 2i and 2i + 1.
class QuantizedRows {
 public:
  QuantizedRows(const TensorView& x, const RowKinds& kinds, const QuantizeKernel& kernel)
      : x_(x), kinds_(kinds), kernel_(kernel), gather_(x.stride[x.shape.ndim - 1] != 1 && kinds.k > 1) {}

  int64_t bytes(int64_t rows) const {
    int64_t sum = 0;
    for (int i = 0; i < kinds_.count; ++i) {
      const RowKind& kind = kinds_.of[i];
      const int64_t of_kind = rows * kind.planes;
      sum += aligned(of_kind * kinds_.blocks * kBlockInputs) + 2 * aligned(of_kind * kind.segments * 4);
      if (kind.group_sums) sum += aligned(of_kind * kind.groups * 4);
    }
    return sum;
  }
  // Bytes per worker for a row that is gathered or rotated, or for its second plane.
  int64_t row_bytes() const {
    return gather_bytes() + (kinds_.rotated ? float_bytes() : 0) + (kinds_.most_planes > 1 ? float_bytes() : 0);
  }

  // Places the rows in `memory`, of bytes(rows) bytes.
  void place(char* memory, int64_t rows) {
    const auto take = [&memory](int64_t bytes) {
      char* const taken = memory;
      memory += aligned(bytes);
      return taken;
    };
    for (int i = 0; i < kinds_.count; ++i) {
      const RowKind& kind = kinds_.of[i];
      const int64_t of_kind = rows * kind.planes;
      Rows& to = rows_[i];
      to.a = reinterpret_cast<int8_t*>(take(of_kind * kinds_.blocks * kBlockInputs));
      to.scales = reinterpret_cast<float*>(take(of_kind * kind.segments * 4));
      to.sums = reinterpret_cast<int32_t*>(take(of_kind * kind.segments * 4));
      if (kind.group_sums) to.group_sums = reinterpret_cast<float*>(take(of_kind * kind.groups * 4));
    }
  }

  // Quantizes row `row` of x to row `index`. `memory`: row_bytes() of the worker.
  void quantize(int64_t row, int64_t index, char* memory) const {
    const int last = x_.shape.ndim - 1;
    const int64_t item = element_bytes(x_.type);
    const char* source = static_cast<const char*>(x_.data) + item * offset_of(x_, last, row);
    if (gather_) {
      gather(item, source, x_.stride[last], memory, kinds_.k);
      source = memory;
    }
    float* const rotated = reinterpret_cast<float*>(memory + gather_bytes());
    float* const rest = reinterpret_cast<float*>(memory + gather_bytes() + (kinds_.rotated ? float_bytes() : 0));
    int64_t rotated_inputs = 0;  // rotation of the values at `source`
    for (int i = 0; i < kinds_.count; ++i) {
      const RowKind& kind = kinds_.of[i];
      if (kind.rotated_inputs != 0 && kind.rotated_inputs != rotated_inputs) {
        rotated_inputs = kind.rotated_inputs;
        rotate_row(source, dtype_of(x_.type), rotated, kinds_.k, rotated_inputs);
      }
      QuantizeArgs args = row_of(i, index * kind.planes);
      args.x = kind.rotated_inputs == 0 ? source : reinterpret_cast<const char*>(rotated);
      args.x_dtype = kind.rotated_inputs == 0 ? dtype_of(x_.type) : DType::f32;
      kernel_.run(args);
      if (kind.planes == 1) continue;
      choose_elementwise(active_isa())
          .residual({args.x, args.a, args.scales, rest, args.k, args.group_inputs, args.x_dtype});
      args = row_of(i, index * kind.planes + 1);
      args.x = rest;
      args.x_dtype = DType::f32;
      kernel_.run(args);
    }
  }

  // Copies row `from` to row `to`.
  void copy(int64_t from, int64_t to) const {
    for (int i = 0; i < kinds_.count; ++i) {
      const RowKind& kind = kinds_.of[i];
      const Rows& rows = rows_[i];
      copy_row(rows.a, from, to, kind.planes * kinds_.blocks * kBlockInputs);
      copy_row(rows.scales, from, to, kind.planes * kind.segments);
      copy_row(rows.sums, from, to, kind.planes * kind.segments);
      if (kind.group_sums) copy_row(rows.group_sums, from, to, kind.planes * kind.groups);
    }
  }

  // Sets the arguments of a matrix's kernel to `rows` rows of x from row `first` on.
  void give(LinearArgs& args, int kind, const Layout& layout, int64_t first, int64_t rows) const {
    const Rows& from = rows_[kind];
    const int planes = layout.planes();
    args.m = rows * planes;
    args.a = from.a + first * planes * layout.blocks * kBlockInputs;
    args.scales = from.scales + first * planes * layout.segments;
    args.sums = from.sums + first * planes * layout.segments;
    args.group_sums = has_mins(layout.mapping) ? from.group_sums + first * planes * layout.groups : nullptr;
  }

 private:
  int64_t float_bytes() const { return aligned(kinds_.k * static_cast<int64_t>(sizeof(float))); }
  int64_t gather_bytes() const { return gather_ ? aligned(kinds_.k * element_bytes(x_.type)) : 0; }

  // The arguments except x.
  QuantizeArgs row_of(int i, int64_t index) const {
    const RowKind& kind = kinds_.of[i];
    const Rows& to = rows_[i];
    QuantizeArgs args{};
    args.k = kinds_.k;
    args.k_padded = kinds_.blocks * kBlockInputs;
    args.group_inputs = kind.group_inputs;
    args.a = to.a + index * args.k_padded;
    args.scales = to.scales + index * kind.segments;
    args.sums = to.sums + index * kind.segments;
    args.group_sums = kind.group_sums ? to.group_sums + index * kind.groups : nullptr;
    args.context = kernel_.context;
    return args;
  }

  template <class T>
  static void copy_row(T* rows, int64_t from, int64_t to, int64_t count) {
    std::memcpy(rows + to * count, rows + from * count, static_cast<size_t>(count) * sizeof(T));
  }

  struct Rows {
    int8_t* a = nullptr;
    float* scales = nullptr;
    int32_t* sums = nullptr;
    float* group_sums = nullptr;
  };

  const TensorView& x_;
  const RowKinds& kinds_;
  const QuantizeKernel& kernel_;
  const bool gather_;
  Rows rows_[kMostMatrices];
};

// Sets `args` to panels [begin, end) of a matrix in panel16 that begins at `panels`, as a matrix of their own.
inline void take_panels(LinearArgs& args, const Layout& whole, const uint8_t* panels, int64_t begin, int64_t end) {
  args.layout = whole;
  args.layout.panels = end - begin;
  args.layout.n = end == whole.panels ? whole.n - begin * kPanelRows : (end - begin) * kPanelRows;
  args.layout.total_bytes = whole.header_bytes + (end - begin) * whole.panel_bytes;
  args.panels = panels + begin * whole.panel_bytes;
  args.panel_begin = 0;
  args.panel_end = end - begin;
}

// Chooses the kernel for `rows` rows of x, which may have no function (choose_linear), and the one for threads without a matrix
// unit. The two differ only if the first needs a matrix unit and there are more threads than units.
inline void choose_kernels(const Layout& layout, int64_t rows, int threads, const LinearKernel** kernel,
                           const LinearKernel** beside) {
  const int64_t m = rows * layout.planes();
  *kernel = *beside = &choose_linear(layout, m, active_isa(), streams());
  if (((*kernel)->isa & kSme2) != 0 && threads > sme_threads()) {
    *beside = &choose_linear(layout, m, active_isa() & ~IsaBits{kSme2}, streams());
  }
}

// Bytes of the float32 results of `rows` rows of x in two planes, for `panels` panels.
constexpr int64_t planes_bytes(int64_t rows, int64_t panels) {
  return 2 * rows * panels * kPanelRows * static_cast<int64_t>(sizeof(float));
}

// Runs a kernel on rows of two planes. The results are written to `tile`, planes_bytes() of memory.
inline void run_planes(const LinearKernel& kernel, LinearArgs args, char* tile) {
  args.out = tile;
  args.out_dtype = DType::f32;
  args.out_stride = args.layout.panels * kPanelRows;
  args.context = kernel.context;
  kernel.run(args);
}

// Adds the planes of `rows` rows of x, from row `first` of the tile on, to `out`. `args`: the arguments of the kernel.
inline void add_planes(const LinearArgs& args, const char* tile, int64_t first, int64_t rows, void* out, DType dtype,
                       int64_t out_step) {
  const Layout& layout = args.layout;
  AddPlanesArgs add{};
  add.planes_step = layout.panels * kPanelRows;
  add.planes = reinterpret_cast<const float*>(tile) + 2 * first * add.planes_step;
  // The biases follow the row scales and the row sums. Kernels add them whatever the header says (docs/format_errata.md).
  add.biases = args.panels + layout.head_offset + 2 * kHeadBytes / 3;
  add.biases_step = layout.panel_bytes;
  add.out = out;
  add.out_step = out_step;
  add.rows = rows;
  add.width = layout.n;
  add.dtype = dtype;
  choose_elementwise(active_isa()).add_planes(add);
}

}  // namespace lowbit
