#include <new>

#include "../kernels/registry.h"
#include "check.h"
#include "first_weights.h"
#include "float_environment.h"
#include "nodes.h"
#include "operators.h"
#include "quantized_rows.h"
#include "rotate.h"
#include "rows.h"
#include "schedule.h"
#include "scratch.h"
#include "sme_threads.h"
#include "tiles.h"

namespace lowbit {
namespace {

// Approximate memory for the rows of m that are quantized at once; it is kept (scratch.h). More rows need another parallel
// region.
constexpr int64_t kScratchBytes = 8 << 20;

// Number of rows that are quantized at once, of `row_bytes` each.
int64_t rows_at_once(int64_t rows, int64_t row_bytes) {
  const int64_t limit = kScratchBytes / row_bytes;
  const int64_t whole_bands = limit < kBandRows ? kBandRows : limit / kBandRows * kBandRows;
  return rows <= limit || rows < whole_bands ? rows : whole_bands;
}

// A claim of a thread's own part of the panels is at most this many.
constexpr int64_t kClaimOwnPanels = 128;

// A matrix of a call, and where its results are written.
struct Matrix {
  Layout layout;
  const uint8_t* panels;
  const LinearKernel* kernel;
  const LinearKernel* beside;  // for threads without a matrix unit: sme_threads.h
  int64_t first_panel;  // number among the panels of all matrices of the call
  char* out;            // row 0, this matrix's first column
  int kind;             // the kind of quantized rows that it reads
};

// The matrices of a call. All of them have k inputs.
struct Matrices {
  Matrix of[kMostMatrices];
  int count = 0;
  int64_t panels = 0, outputs = 0;
  RowKinds kinds;

  void add(const Layout& layout, const uint8_t* bytes) {
    of[count++] = {layout, bytes + layout.header_bytes, nullptr, nullptr, panels, nullptr, kinds.add(layout)};
    panels += layout.panels;
    outputs += layout.n;
  }
};

// Memory per worker for float32 results of two planes before they are added, approximately: at least for as many panels as a
// kernel for many rows computes at once. So the number of rows of a band is limited, too.
constexpr int64_t kPlanesBytes = 1 << 20;
constexpr int64_t kPlanesRows = 512;

// Number of panels of a matrix in two planes that are computed at once, for bands of up to `rows` rows of x.
int64_t planes_panels(const Matrix& matrix, int64_t rows) {
  int64_t at_once = panels_at_once(*matrix.kernel);
  if (panels_at_once(*matrix.beside) > at_once) at_once = panels_at_once(*matrix.beside);
  const int64_t fits = kPlanesBytes / planes_bytes(rows, 1);
  return rounded_up(fits < kClaimPanels ? kClaimPanels : fits, at_once);
}

int64_t tile_bytes_of(const Matrices& matrices, int64_t rows) {
  int64_t most = 0;
  for (int i = 0; i < matrices.count; ++i) {
    const Matrix& matrix = matrices.of[i];
    if (!matrix.layout.two_planes) continue;
    int64_t panels = planes_panels(matrix, rows);
    if (panels > matrix.layout.panels) panels = matrix.layout.panels;
    const int64_t bytes = aligned(planes_bytes(rows, panels));
    if (bytes > most) most = bytes;
  }
  return most;
}

// Computes panels [begin, end) of a matrix in two planes for `rows` rows of x, `step` panels at once in `tile`, to `args.out`.
void run_panels_of_planes(const Matrix& matrix, const LinearKernel& kernel, const LinearArgs& args, int64_t rows, int64_t step,
                          char* tile, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel += step) {
    LinearArgs piece = args;
    take_panels(piece, matrix.layout, matrix.panels, panel, panel + step < end ? panel + step : end);
    run_planes(kernel, piece, tile);
    char* const out = static_cast<char*>(args.out) + panel * kPanelRows * size_of(args.out_dtype);
    add_planes(piece, tile, 0, rows, out, args.out_dtype, args.out_stride);
  }
}

// Computes panels [begin, end) of all matrices, for a band of the grid. `args` has scratch, out_dtype and out_stride.
void run_panels(const Matrices& matrices, const QuantizedRows& quantized, int worker, const Grid& grid, int64_t band,
                int64_t out_offset, LinearArgs args, char* tile, int64_t begin, int64_t end) {
  const int64_t first_row = band * grid.band_rows, rows = grid.rows_of(band);
  for (int i = 0; i < matrices.count; ++i) {
    const Matrix& matrix = matrices.of[i];
    const int64_t matrix_end = matrix.first_panel + matrix.layout.panels;
    if (matrix_end <= begin || matrix.first_panel >= end) continue;
    args.panels = matrix.panels;
    args.layout = matrix.layout;
    args.panel_begin = begin > matrix.first_panel ? begin - matrix.first_panel : 0;
    args.panel_end = (end < matrix_end ? end : matrix_end) - matrix.first_panel;
    args.out = matrix.out + out_offset;
    quantized.give(args, matrix.kind, matrix.layout, first_row, rows);
    const LinearKernel& kernel = *(worker < sme_threads() ? matrix.kernel : matrix.beside);
    if (matrix.layout.two_planes) {
      const int64_t step = planes_panels(matrix, grid.band_rows);
      run_panels_of_planes(matrix, kernel, args, rows, step, tile, args.panel_begin, args.panel_end);
      continue;
    }
    args.context = kernel.context;
    kernel.run(args);
  }
}

// linear() with a kernel that prepares activations in its own form, for `rows` rows of x. All arguments have been checked.
Status linear_prepared(const Matrix& matrix, const TensorView& x, int64_t rows, int64_t out_stride,
                       const Parallel& parallel) {
  const LinearKernel& kernel = *matrix.kernel;
  const Layout& layout = matrix.layout;
  const int last = x.shape.ndim - 1;
  const DType dtype = dtype_of(x.type);
  // The kernel reads x itself if it can. Otherwise it gets a copy, in float32 or in the type of x.
  const int64_t rotated_inputs = layout.rotated_inputs();
  const bool reads_type = (kernel.x_types & bit_of(dtype)) != 0 && rotated_inputs == 0;
  const bool reads_x = reads_type && x.is_contiguous();
  const int64_t item = reads_type ? element_bytes(x.type) : static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes = layout.k * item;
  const int64_t chunk = rows_at_once(rows, row_bytes);
  const int64_t activation_bytes = kernel.activation_bytes(kernel.context, layout, chunk);
  if (Status s = check_asked(kernel, "activations", activation_bytes, 1); !s.ok()) return s;
  const Parallel threads = rows * layout.k * layout.n < kParallelProducts ? Parallel() : parallel;
  int64_t scratch_bytes = kLinearScratchBytes;
  if (Status s = add_scratch(kernel, layout, chunk, threads.threads, &scratch_bytes); !s.ok()) return s;
  const int64_t copy_bytes = reads_x ? 0 : aligned(chunk * row_bytes);
  const int64_t bytes = aligned(activation_bytes) + copy_bytes + threads.threads * scratch_bytes;
  const Scratch memory(bytes);
  if (memory.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of activations", bytes);
  char* const copy = memory.data() + aligned(activation_bytes);
  char* const kernel_scratch = copy + copy_bytes;
  const int64_t rows_per_claim = (1 + kClaimValues / layout.k / kernel.m_least) * kernel.m_least;
  const int64_t panels_per_claim = rounded_up(1 + kClaimProducts / (layout.k * kPanelRows), panels_at_once(kernel));

  for (int64_t first = 0; first < rows; first += chunk) {
    LinearArgs args{};
    args.panels = matrix.panels;
    args.layout = layout;
    args.m = rows - first < chunk ? rows - first : chunk;
    args.out = matrix.out + first * out_stride * element_bytes(x.type);
    args.out_dtype = dtype;
    args.out_stride = out_stride;
    args.activations = memory.data();
    args.context = kernel.context;
    PrepareArgs prepare{};
    prepare.x = reads_x ? static_cast<const char*>(x.data) + first * row_bytes : copy;
    prepare.x_dtype = reads_type ? dtype : DType::f32;
    prepare.x_stride = layout.k;
    prepare.layout = layout;
    prepare.m = args.m;
    prepare.activations = memory.data();
    prepare.context = kernel.context;
    parallel_1d(threads, args.m, rows_per_claim, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && !reads_x; ++i) {
        const char* row = static_cast<const char*>(x.data) + element_bytes(x.type) * offset_of(x, last, first + i);
        char* const to = copy + i * row_bytes;
        if (reads_type) {
          gather(item, row, x.stride[last], to, layout.k);
          continue;
        }
        for (int64_t j = 0; j < layout.k; ++j) store_from_f32(to, DType::f32, j, load_as_f32(row, dtype, j * x.stride[last]));
        if (rotated_inputs != 0) rotate_row(to, DType::f32, reinterpret_cast<float*>(to), layout.k, rotated_inputs);
      }
      PrepareArgs claim = prepare;
      claim.begin = begin;
      claim.end = end;
      kernel.prepare(claim);
    });
    parallel_1d(threads, layout.panels, panels_per_claim, [&](int worker, int64_t begin, int64_t end) {
      LinearArgs tile = args;
      tile.scratch = kernel_scratch + worker * scratch_bytes;
      tile.panel_begin = begin;
      tile.panel_end = end;
      kernel.run(tile);
    });
  }
  return {};
}

// Divides the rows and panels of a call, for `threads` threads.
Grid make_grid(int64_t rows, const Matrices& matrices, const Parallel& parallel) {
  const int threads = parallel.threads;
  const auto whole_chunks = [&](int64_t value) { return at_least_1(value / kBandRows) * kBandRows; };
  const int planes = matrices.kinds.most_planes;
  int64_t cached = whole_chunks(kBandBytes / (planes * matrices.kinds.blocks * kBlockInputs));
  if (planes > 1 && cached > kPlanesRows) cached = kPlanesRows;
  const int64_t balanced = whole_chunks(rows * matrices.panels / (kTilesPerThread * threads));
  Grid grid{};
  const int64_t most = cached < balanced ? cached : balanced;
  const int64_t bands = (rows + most - 1) / most;
  grid.rows = rows;
  grid.band_rows = (rows + bands - 1) / bands;  // nearly equal bands, so that no band unpacks for only a row or two
  grid.prepare_rows = at_least_1(kClaimValues / matrices.kinds.k);
  grid.columns = matrices.panels;
  const int64_t panel_products = grid.rows_of(0) * matrices.kinds.k * kPanelRows;
  grid.least_columns = 1 + kClaimProducts / panel_products;
  int64_t at_once = 1;
  for (int i = 0; i < matrices.count; ++i) {
    const LinearKernel& kernel = *matrices.of[i].kernel;
    if (!cut_at_multiples(kernel, matrices.panels, threads)) continue;
    if (panels_at_once(kernel) > at_once) at_once = panels_at_once(kernel);
  }
  grid.least_columns = rounded_up(grid.least_columns, at_once);
  grid.most_columns = grid.least_columns < kClaimPanels ? kClaimPanels : grid.least_columns;
  if (matrices.count == 1 && threads > 1) {  // several matrices have no single part per node
    grid.nodes = nodes_with_parts();
    grid.node_of = [](int) { return node_here(); };
  }
  if (grid.nodes == 1 && grid.bands() == 1 && threads > 1 && parallel.part != nullptr) {
    grid.nodes = threads;
    grid.node_of = parallel.part;
    // Claims shrink as a part does, and each begins new streams from memory.
    grid.most_columns = rounded_up(kClaimOwnPanels, grid.least_columns);
  }
  return grid;
}

// The useful number of threads for `rows` rows of x.
int threads_for(int64_t rows, const Matrices& matrices, const Parallel& parallel) {
  const int64_t products = rows * matrices.kinds.most_planes * matrices.kinds.k * matrices.panels * kPanelRows;
  return products < kParallelProducts ? 1 : parallel.threads;
}

// linear() with kernels that read int8 rows, for all matrices and `rows` rows of x. All arguments have been checked.
Status linear_quantized(const Matrices& matrices, const TensorView& x, int64_t rows, const Parallel& parallel) {
  QuantizedRows quantized(x, matrices.kinds, choose_quantize(active_isa()));
  const int64_t chunk = rows_at_once(rows, quantized.bytes(1));
  const int threads = threads_for(chunk, matrices, parallel);
  Grid grid = make_grid(chunk, matrices, {threads, parallel.run, parallel.part});
  const int64_t quantized_bytes = quantized.bytes(chunk);
  const int64_t bands_bytes = grid.bands() * grid.nodes * static_cast<int64_t>(sizeof(Band));
  int64_t scratch_bytes = kLinearScratchBytes;
  for (int i = 0; i < matrices.count; ++i) {
    for (const LinearKernel* kernel : {matrices.of[i].kernel, matrices.of[i].beside}) {
      const Layout& layout = matrices.of[i].layout;
      const int64_t m = grid.rows_of(0) * layout.planes();
      if (Status s = add_scratch(*kernel, layout, m, threads, &scratch_bytes); !s.ok()) return s;
    }
  }
  const int64_t tile_bytes = tile_bytes_of(matrices, grid.band_rows);
  const int64_t worker_bytes = scratch_bytes + tile_bytes + quantized.row_bytes();
  const int64_t bytes = bands_bytes + quantized_bytes + threads * worker_bytes;
  const Scratch scratch(bytes);
  if (scratch.data() == nullptr) {
    return Status::no_memory("no memory for %" PRId64 " bytes of quantized activations", bytes);
  }
  char* const band_memory = scratch.data();
  char* const rows_memory = band_memory + bands_bytes;
  char* const workers = rows_memory + quantized_bytes;
  quantized.place(rows_memory, chunk);

  const DefaultFloats floats;
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    grid.rows = rows - begin < chunk ? rows - begin : chunk;
    Band* const bands = new (band_memory) Band[static_cast<size_t>(grid.bands() * grid.nodes)];
    const auto quantize_rows = [&](int worker, int64_t first, int64_t end) {
      char* const memory = workers + worker * worker_bytes + scratch_bytes + tile_bytes;
      for (int64_t i = first; i < end; ++i) quantized.quantize(begin + i, i, memory);
    };
    const bool few = grid.rows * matrices.kinds.k < kParallelValues;
    if (few) quantize_rows(0, 0, grid.rows);
    parallel_2d({threads, parallel.run, parallel.part}, grid, bands,
                [&](int worker, int64_t first, int64_t end) {
                  if (!few) quantize_rows(worker, first, end);
                },
                [&](int worker, int64_t band, int64_t first_panel, int64_t end_panel) {
                  const int64_t first = band * grid.band_rows;
                  LinearArgs args{};
                  args.out_dtype = dtype_of(x.type);
                  args.out_stride = matrices.outputs;
                  char* const memory = workers + worker * worker_bytes;
                  args.scratch = memory;
                  const int64_t out_offset = (begin + first) * matrices.outputs * element_bytes(x.type);
                  run_panels(matrices, quantized, worker, grid, band, out_offset, args, memory + scratch_bytes, first_panel,
                             end_panel);
                });
  }
  return {};
}

// Checks the arguments of linears() and reads the headers.
Status read_matrices(const TensorView& x, const TensorView* packed, const int64_t* out_features, int64_t count,
                     const TensorView& out, Matrices* matrices) {
  Shape out_shape;
  if (Status status = linears_shape(x, out_features, count, &out_shape); !status.ok()) return status;
  if (Status status = check_activations("x", x); !status.ok()) return status;
  const int last = x.shape.ndim - 1;
  for (int64_t i = 0; i < count; ++i) {
    Layout layout;
    if (Status status = read_packed(packed[i], &layout); !status.ok()) return status;
    if (out_features[i] != layout.n) {
      return Status::error("out_features is %" PRId64 "; expected %" PRId64 ", the rows of the packed weight",
                           out_features[i], layout.n);
    }
    if (x.shape.size[last] != layout.k) {
      return Status::error("x has shape %s; expected [..., %" PRId64 "], the inputs of the packed weight",
                           describe(x.shape).text, layout.k);
    }
    matrices->add(layout, static_cast<const uint8_t*>(packed[i].data));
  }
  if (Status status = check_tensor("out", out, x.type, out_shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}}); !status.ok()) return status;
  for (int64_t i = 0; i < count; ++i) {
    if (Status s = check_apart({{"out", &out}}, {{"packed_weight", &packed[i]}}); !s.ok()) return s;
  }
  return {};
}

// Chooses the kernels of all matrices for `rows` rows of x, and sets where their columns of the output begin.
Status plan_matrices(const TensorView& x, int64_t rows, const TensorView& out, const Parallel& parallel,
                     Matrices* matrices, bool* prepared) {
  char* column = static_cast<char*>(out.data);
  for (int i = 0; i < matrices->count; ++i) {
    Matrix& matrix = matrices->of[i];
    choose_kernels(matrix.layout, rows, parallel.threads, &matrix.kernel, &matrix.beside);
    if (matrix.kernel->run == nullptr) return no_kernel("linear", matrix.layout);
    matrix.out = column;
    column += matrix.layout.n * element_bytes(x.type);
    *prepared = *prepared || matrix.kernel->prepare != nullptr;
  }
  return {};
}

}  // namespace

Status read_packed(const TensorView& packed, Layout* layout) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_memory("packed_weight", packed); !status.ok()) return status;
  if (packed.type != ElementType::u8 || packed.shape.ndim != 1) {
    return Status::error("packed_weight has dtype %s and shape %s; expected uint8 and one dimension",
                         name_of(packed.type), describe(packed.shape).text);
  }
  if (!packed.is_contiguous()) return Status::error("packed_weight is not contiguous");
  return read_header(packed.data, packed.shape.size[0], layout);
}

Status linears_shape(const TensorView& x, const int64_t* out_features, int64_t count, Shape* out) {
  if (Status status = check_shape("x", x.shape); !status.ok()) return status;
  if (x.shape.ndim < 1) return Status::error("x has no dimensions; expected [..., in_features]");
  if (count < 1 || count > kMostMatrices) {
    return Status::error("there are %" PRId64 " out_features; expected 1 to %d", count, kMostMatrices);
  }
  int64_t outputs = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (out_features[i] < 1) return Status::error("out_features is %" PRId64 "; expected 1 or more", out_features[i]);
    if (__builtin_add_overflow(outputs, out_features[i], &outputs)) {
      return Status::error("out_features is %" PRId64 "; expected less", out_features[i]);
    }
  }
  *out = x.shape;
  out->size[out->ndim - 1] = outputs;
  return {};
}

Status linear_shape(const TensorView& x, int64_t out_features, Shape* out) {
  return linears_shape(x, &out_features, 1, out);
}

Status linears(const TensorView& x, const TensorView* packed, const int64_t* out_features, int64_t count,
               const TensorView& out, const Parallel& parallel) {
  if (Status status = sme_threads_status(); !status.ok()) return status;
  if (Status status = placement_status(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  Matrices matrices;
  if (Status status = read_matrices(x, packed, out_features, count, out, &matrices); !status.ok()) return status;
  const int64_t rows = x.shape.numel() / matrices.kinds.k;
  if (rows == 0) return {};
  bool prepared = false;  // whether a kernel prepares activations in its own form
  if (Status status = plan_matrices(x, rows, out, parallel, &matrices, &prepared); !status.ok()) return status;
  if (!prepared) return linear_quantized(matrices, x, rows, parallel);

  // Kernels with their own form of activations share no rows with others.
  Matrices rest;
  for (int i = 0; i < matrices.count; ++i) {
    const Matrix& matrix = matrices.of[i];
    if (matrix.kernel->prepare != nullptr) {
      if (Status status = linear_prepared(matrix, x, rows, matrices.outputs, parallel); !status.ok()) return status;
      continue;
    }
    rest.add(matrix.layout, matrix.panels - matrix.layout.header_bytes);
    rest.of[rest.count - 1].kernel = matrix.kernel;
    rest.of[rest.count - 1].beside = matrix.beside;
    rest.of[rest.count - 1].out = matrix.out;
  }
  rest.outputs = matrices.outputs;
  return rest.count == 0 ? Status() : linear_quantized(rest, x, rows, parallel);
}

FirstWeights first_weights(const TensorView& x, const TensorView* packed, const int64_t* out_features, int64_t count,
                           const TensorView& out, const Parallel& parallel, int part) {
  Matrices matrices;
  bool prepared = false;
  if (!read_matrices(x, packed, out_features, count, out, &matrices).ok()) return {};
  const int64_t rows = x.shape.numel() / matrices.kinds.k;
  if (!plan_matrices(x, rows, out, parallel, &matrices, &prepared).ok() || prepared) return {};
  const Grid grid = make_grid(rows, matrices, {threads_for(rows, matrices, parallel), parallel.run, parallel.part});
  if (parallel.part == nullptr || grid.node_of != parallel.part || part >= grid.nodes) return {};
  const int64_t panel = grid.part(part);
  for (int i = 0; i < matrices.count; ++i) {
    const Matrix& matrix = matrices.of[i];
    const int64_t own = panel - matrix.first_panel;
    if (own < 0 || own >= matrix.layout.panels) continue;
    const int64_t streams = panels_at_once(*matrix.kernel);
    return {matrix.panels + own * matrix.layout.panel_bytes, matrix.layout.panel_bytes,
            streams < matrix.layout.panels - own ? streams : matrix.layout.panels - own};
  }
  return {};
}

Status linear(const TensorView& x, const TensorView& packed, int64_t out_features, const TensorView& out,
              const Parallel& parallel) {
  return linears(x, &packed, &out_features, 1, out, parallel);
}

}  // namespace lowbit
