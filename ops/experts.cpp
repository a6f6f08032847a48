#include <memory>
#include <new>

#include "../kernels/registry.h"
#include "aligned_memory.h"
#include "check.h"
#include "operators.h"
#include "quantized_rows.h"
#include "rows.h"
#include "schedule.h"
#include "scratch.h"
#include "sme_threads.h"
#include "tiles.h"

namespace lowbit {
namespace {

// Approximate memory for rows that are quantized at once; it is kept (scratch.h). More rows read the weights of their experts
// again, so this is more than linear() uses.
constexpr int64_t kScratchBytes = 16 << 20;
// Results of a tile of several rows before they are copied to their places. Larger results mean tiles of fewer panels.
constexpr int64_t kTileBytes = 256 << 10;

// Some rows of one expert: places [first, first + rows) in the order of experts.
struct ExpertRows {
  int64_t expert, first, rows;
  const LinearKernel* kernel;
  const LinearKernel* beside;  // for threads without a matrix unit: sme_threads.h
};

// A tensor of `size[0]` packed matrices of `size[1]` bytes each.
Status check_packed(const TensorView& packed) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_memory("packed_weights", packed); !status.ok()) return status;
  if (packed.type != ElementType::u8 || packed.shape.ndim != 2 || packed.shape.size[0] < 1) {
    return Status::error("packed_weights has dtype %s and shape %s; expected uint8 and [experts, bytes]",
                         name_of(packed.type), describe(packed.shape).text);
  }
  if (!packed.is_contiguous()) return Status::error("packed_weights is not contiguous");
  return {};
}

const uint8_t* expert_bytes(const TensorView& packed, int64_t expert) {
  return static_cast<const uint8_t*>(packed.data) + expert * packed.shape.size[1];
}

// The expert of the first result. All others must have the same format, groups, rotation and planes.
struct FirstExpert {
  int64_t expert;
  Layout layout;
};

// Reads the matrix of an expert. It must fit x, `out_features` and the first expert, if that is known.
Status read_expert(const TensorView& packed, int64_t expert, const TensorView& x, int64_t out_features,
                   const FirstExpert* first, Layout* layout) {
  if (Status s = read_header(expert_bytes(packed, expert), packed.shape.size[1], layout); !s.ok()) {
    return Status::error("expert %" PRId64 ": %.400s", expert, s.message());
  }
  if (first != nullptr && layout->format != first->layout.format) {
    return Status::error("expert %" PRId64 " is packed in format '%s'; expected '%s', as expert %" PRId64, expert,
                         name_of(layout->format).text, name_of(first->layout.format).text, first->expert);
  }
  if (out_features != layout->n) {
    return Status::error("out_features is %" PRId64 "; expected %" PRId64 ", the rows of expert %" PRId64,
                         out_features, layout->n, expert);
  }
  if (x.shape.size[x.shape.ndim - 1] != layout->k) {
    return Status::error("x has shape %s; expected [..., %" PRId64 "], the inputs of expert %" PRId64,
                         describe(x.shape).text, layout->k, expert);
  }
  if (first != nullptr && first->layout.rotation != layout->rotation) {
    return Status::error("expert %" PRId64 " has inputs in rotated blocks of %" PRId64 "; expected %" PRId64
                         ", as expert %" PRId64 " (0: not rotated)",
                         expert, layout->rotated_inputs(), first->layout.rotated_inputs(), first->expert);
  }
  if (first != nullptr && first->layout.two_planes != layout->two_planes) {
    return Status::error("expert %" PRId64 " has activations of %d bits; expected %d, as expert %" PRId64, expert,
                         layout->activation_bits(), first->layout.activation_bits(), first->expert);
  }
  if (first != nullptr && first->layout.group_inputs() != layout->group_inputs()) {
    return Status::error("expert %" PRId64 " has groups of %" PRId64 " inputs; expected %" PRId64 ", as expert %" PRId64,
                         expert, layout->group_inputs(), first->layout.group_inputs(), first->expert);
  }
  return {};
}

// Takes consecutive pieces of an operator's memory. With null memory it only counts bytes.
class Pieces {
 public:
  explicit Pieces(char* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    char* const taken = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += aligned(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(taken);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

// The working memory of a call. Each row of x has one result for each of its experts, `per_row` in total: result r belongs to
// row r / per_row.
struct Memory {
  Layout* layouts;      // of each chosen expert
  int64_t* chosen;      // by result: its expert
  int64_t* next;        // by expert: the next place for its rows
  ExpertRows* parts;
  int64_t* results;     // by place: its result
  int64_t* places;      // by result of the chunk: its place
  char* rows;           // by place: quantized rows
  char* workers;

  void place(Pieces& pieces, int64_t experts, int64_t all, int64_t chunk, int64_t row_bytes, int64_t worker_bytes) {
    layouts = pieces.take<Layout>(experts);
    chosen = pieces.take<int64_t>(all);
    next = pieces.take<int64_t>(experts + 1);
    parts = pieces.take<ExpertRows>(experts + chunk / kBandRows + 1);
    results = pieces.take<int64_t>(chunk);
    places = pieces.take<int64_t>(chunk);
    rows = pieces.take<char>(row_bytes);
    workers = pieces.take<char>(worker_bytes);
  }
};

class Call {
 public:
  Call(const TensorView& x, const TensorView& packed, const TensorView& out, int64_t per_row, const Memory& memory,
       const QuantizedRows& quantized)
      : x_(x), packed_(packed), out_(static_cast<char*>(out.data)), per_row_(per_row), memory_(memory), quantized_(quantized),
        item_(element_bytes(x.type)) {}

  // Quantizes row `row` of x once, and copies it to the places of its results. `first`: first result of the chunk.
  void quantize(int64_t row, int64_t first, char* memory) const {
    const int64_t* const places = memory_.places + row * per_row_ - first;
    quantized_.quantize(row, places[0], memory);
    for (int64_t i = 1; i < per_row_; ++i) quantized_.copy(places[0], places[i]);
  }

  // Computes panels [begin, end) for some rows of an expert, as a matrix of its own: the kernel writes results to the worker's
  // memory, and they are copied to their places in the output. `scratch` is for the kernel.
  void run(const ExpertRows& part, int64_t begin, int64_t end, const LinearKernel& kernel, char* worker, char* scratch) const {
    const Layout& whole = memory_.layouts[part.expert];
    LinearArgs args{};
    take_panels(args, whole, expert_bytes(packed_, part.expert) + whole.header_bytes, begin, end);
    quantized_.give(args, 0, whole, part.first, part.rows);
    args.scratch = scratch;
    const int64_t* const results = memory_.results + part.first;
    char* const column = out_ + begin * kPanelRows * item_;
    char* const tile = worker + kLinearScratchBytes;
    const DType dtype = dtype_of(x_.type);
    if (whole.two_planes) {
      run_planes(kernel, args, tile);
      for (int64_t i = 0; i < part.rows; ++i) {
        add_planes(args, tile, i, 1, column + results[i] * whole.n * item_, dtype, whole.n);
      }
      return;
    }
    args.out_dtype = dtype;
    const bool alone = part.rows == 1;
    args.out = alone ? column + results[0] * whole.n * item_ : tile;
    args.out_stride = alone ? whole.n : args.layout.n;
    args.context = kernel.context;
    kernel.run(args);
    const int64_t bytes = args.layout.n * item_;
    for (int64_t i = 0; i < part.rows && !alone; ++i) {
      std::memcpy(column + results[i] * whole.n * item_, static_cast<const char*>(args.out) + i * bytes,
                  static_cast<size_t>(bytes));
    }
  }

 private:
  const TensorView &x_, &packed_;
  char* out_;
  int64_t per_row_;
  const Memory& memory_;
  const QuantizedRows& quantized_;
  int64_t item_;
};

// Sorts results [first, first + count) by expert, into parts of up to `most` rows. Returns the number of parts.
int64_t sort_by_expert(const Memory& memory, int64_t experts, int64_t first, int64_t count, int64_t most) {
  std::memset(memory.next, 0, static_cast<size_t>(experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < count; ++i) ++memory.next[memory.chosen[first + i] + 1];
  int64_t parts = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t begin = memory.next[expert], rows = memory.next[expert + 1];
    const int64_t pieces = (rows + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) {  // nearly equal parts, so that no part unpacks for only a row or two
      const int64_t from = rows * i / pieces, to = rows * (i + 1) / pieces;
      memory.parts[parts++] = {expert, begin + from, to - from, nullptr, nullptr};
    }
    memory.next[expert + 1] += begin;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = memory.next[memory.chosen[first + i]]++;
    memory.places[i] = place;
    memory.results[place] = first + i;
  }
  return parts;
}

// Reads the expert of result `i`.
Status read_index(const TensorView& experts, int64_t i, int64_t results, int64_t count, int64_t* expert) {
  *expert = index_at(experts, i);
  if (*expert >= 0 && *expert < count) return {};
  return Status::out_of_range("expert %" PRId64 " (number %" PRId64 " of %" PRId64 ") is out of range; expected 0 to %" PRId64,
                              *expert, i, results, count - 1);
}

// Checks all arguments, and of the chosen experts only the first one. If none is chosen, expert 0 is checked.
Status check(const TensorView& x, const TensorView& packed, const TensorView& experts, int64_t out_features,
             const TensorView& out, const Parallel& parallel, FirstExpert* first) {
  Shape out_shape;
  if (Status status = sme_threads_status(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  if (Status status = linear_experts_shape(x, experts, out_features, &out_shape); !status.ok()) return status;
  if (Status status = check_activations("x", x); !status.ok()) return status;
  if (Status status = check_memory("experts", experts); !status.ok()) return status;
  if (experts.type != ElementType::i64) {
    return Status::error("experts has dtype %s; expected int64", name_of(experts.type));
  }
  if (Status status = check_packed(packed); !status.ok()) return status;
  const int64_t results = experts.shape.numel();
  first->expert = 0;
  if (results != 0) {
    if (Status s = read_index(experts, 0, results, packed.shape.size[0], &first->expert); !s.ok()) return s;
  }
  if (Status s = read_expert(packed, first->expert, x, out_features, nullptr, &first->layout); !s.ok()) return s;
  if (Status status = check_tensor("out", out, x.type, out_shape); !status.ok()) return status;
  return check_apart({{"out", &out}}, {{"x", &x}, {"packed_weights", &packed}, {"experts", &experts}});
}

// Reads the chosen experts and the layouts of their matrices. All other checks are here, before a result is written. The
// checked copy of the indices is used, because another thread may change the caller's indices meanwhile.
Status read_chosen(const TensorView& x, const TensorView& packed, const TensorView& experts, const FirstExpert& first,
                   const Memory& memory) {
  const int64_t results = experts.shape.numel(), count = packed.shape.size[0];
  for (int64_t expert = 0; expert < count; ++expert) new (memory.layouts + expert) Layout{};
  for (int64_t i = 0; i < results; ++i) {
    if (Status s = read_index(experts, i, results, count, memory.chosen + i); !s.ok()) return s;
    const int64_t expert = memory.chosen[i];
    Layout& expert_layout = memory.layouts[expert];
    if (expert_layout.n != 0) continue;
    if (Status s = read_expert(packed, expert, x, first.layout.n, &first, &expert_layout); !s.ok()) return s;
    if (choose_linear(expert_layout, 1, active_isa(), streams()).run == nullptr) return no_kernel("linear", expert_layout);
  }
  return {};
}

// Experts in a vendor's format, where only the format's own functions can find panels: the rows of each expert are gathered and
// passed to linear(). Everything except the chosen experts has been checked.
Status experts_of_vendor(const TensorView& x, const TensorView& packed, const TensorView& experts, const FirstExpert& first,
                         const TensorView& out, const Parallel& parallel) {
  const Layout& layout = first.layout;
  const int64_t results = experts.shape.numel(), count = packed.shape.size[0];
  const int64_t per_row = experts.shape.size[experts.shape.ndim - 1], item = element_bytes(x.type);
  const int last = x.shape.ndim - 1;
  int64_t *chosen, *next, *order;
  char *rows, *products;
  const auto place = [&](char* memory, int64_t most) {
    Pieces pieces(memory);
    chosen = pieces.take<int64_t>(results);
    next = pieces.take<int64_t>(count + 1);
    order = pieces.take<int64_t>(results);
    rows = pieces.take<char>(most * layout.k * item);
    products = pieces.take<char>(most * layout.n * item);
    return pieces.bytes();
  };
  // Number of rows of an expert at a time.
  const int64_t most = at_least_1(kScratchBytes / ((layout.k + layout.n) * item));
  const int64_t at_once = results < most ? results : most;
  const int64_t bytes = place(nullptr, at_once);
  const std::unique_ptr<char, FreeAligned> memory(static_cast<char*>(allocate_aligned(bytes)));
  if (memory == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of activations", bytes);
  place(memory.get(), at_once);

  std::memset(next, 0, static_cast<size_t>(count + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < results; ++i) {
    if (Status s = read_index(experts, i, results, count, chosen + i); !s.ok()) return s;
    if (next[chosen[i] + 1]++ != 0) continue;
    Layout expert_layout;
    if (Status s = read_expert(packed, chosen[i], x, layout.n, &first, &expert_layout); !s.ok()) return s;
    if (choose_linear(expert_layout, 1, active_isa(), streams()).run == nullptr) return no_kernel("linear", expert_layout);
  }
  for (int64_t expert = 0; expert < count; ++expert) next[expert + 1] += next[expert];
  for (int64_t i = 0; i < results; ++i) order[next[chosen[i]]++] = i;

  for (int64_t begin = 0, end; begin < results; begin = end) {
    const int64_t expert = chosen[order[begin]];
    for (end = begin + 1; end < results && end - begin < at_once && chosen[order[end]] == expert;) ++end;
    TensorView some_x = x, some_out = out, matrix = packed;
    for (int64_t i = begin; i < end; ++i) {
      const char* const row = static_cast<const char*>(x.data) + item * offset_of(x, last, order[i] / per_row);
      gather(item, row, x.stride[last], rows + (i - begin) * layout.k * item, layout.k);
    }
    some_x.data = rows;
    some_x.shape = {2, {end - begin, layout.k}};
    some_x.stride[0] = layout.k;
    some_out.data = products;
    some_out.shape = {2, {end - begin, layout.n}};
    some_out.stride[0] = layout.n;
    some_x.stride[1] = some_out.stride[1] = matrix.stride[0] = 1;
    matrix.data = const_cast<uint8_t*>(expert_bytes(packed, expert));
    matrix.shape = {1, {packed.shape.size[1]}};
    if (Status s = linear(some_x, matrix, layout.n, some_out, parallel); !s.ok()) return s;
    const int64_t row_bytes = layout.n * item;
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(static_cast<char*>(out.data) + order[i] * row_bytes, products + (i - begin) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
  return {};
}

// Allocates memory for the kernels of all parts if one needs more than the workers have: `*bytes` for each thread.
Status make_scratch(const Memory& memory, int64_t parts, int threads, int64_t* bytes,
                    std::unique_ptr<char, FreeAligned>* more) {
  const int64_t before = *bytes;
  for (int64_t i = 0; i < parts; ++i) {
    const ExpertRows& part = memory.parts[i];
    for (const LinearKernel* kernel : {part.kernel, part.beside}) {
      const Layout& layout = memory.layouts[part.expert];
      if (Status s = add_scratch(*kernel, layout, part.rows * layout.planes(), threads, bytes); !s.ok()) return s;
    }
  }
  if (*bytes == before) return {};
  more->reset(static_cast<char*>(allocate_aligned(threads * *bytes)));
  return *more != nullptr ? Status() : Status::no_memory("no memory for %" PRId64 " bytes of scratch", threads * *bytes);
}

// Number of panels in a tile of a part. A single row of an expert reads the weights only once, so its tiles are as long as
// possible with enough tiles for all threads. Tiles of more rows, or of two planes, are limited by `tile_bytes`, with `item`
// bytes per result. In both cases the number is a multiple of what the kernels compute at once.
int64_t panels_per_tile(const Memory& memory, int64_t parts, int64_t results, const Layout& layout, int64_t item,
                        int64_t tile_bytes, int threads) {
  int64_t most_rows = 1, at_once = 1;
  for (int64_t i = 0; i < parts; ++i) {
    const ExpertRows& part = memory.parts[i];
    if (part.rows > most_rows) most_rows = part.rows;
    if (cut_at_multiples(*part.kernel, parts * layout.panels, threads) && panels_at_once(*part.kernel) > at_once) {
      at_once = panels_at_once(*part.kernel);
    }
  }
  const int64_t least = 1 + kClaimProducts * parts / (results * layout.k * kPanelRows);
  const bool direct = most_rows == 1 && !layout.two_planes;
  const int64_t fits = direct ? layout.panels : at_least_1(tile_bytes / (most_rows * kPanelRows * item));
  int64_t step = at_least_1(parts * layout.panels / (kTilesPerThread * threads));
  step = rounded_up(step < least ? least : step, at_once);
  return step < fits ? step : fits < at_once ? fits : fits / at_once * at_once;
}

}  // namespace

Status linear_experts_shape(const TensorView& x, const TensorView& experts, int64_t out_features, Shape* out) {
  if (Status status = check_shape("x", x.shape); !status.ok()) return status;
  if (Status status = check_shape("experts", experts.shape); !status.ok()) return status;
  if (x.shape.ndim < 1) return Status::error("x has no dimensions; expected [..., in_features]");
  if (out_features < 1) return Status::error("out_features is %" PRId64 "; expected 1 or more", out_features);
  if (experts.shape.ndim >= kMaxDims) {
    return Status::error("experts has %d dimensions; expected at most %d", experts.shape.ndim, kMaxDims - 1);
  }
  const int last = x.shape.ndim - 1;
  bool same = experts.shape.ndim == x.shape.ndim;
  for (int d = 0; same && d < last; ++d) same = experts.shape.size[d] == x.shape.size[d];
  if (!same) {
    return Status::error("experts has shape %s; expected that of x, %s, with the number of a row's experts instead of "
                         "in_features",
                         describe(experts.shape).text, describe(x.shape).text);
  }
  *out = experts.shape;
  out->size[out->ndim++] = out_features;
  return {};
}

Status linear_experts(const TensorView& x, const TensorView& packed, const TensorView& experts, int64_t out_features,
                      const TensorView& out, const Parallel& parallel) {
  FirstExpert one;
  if (Status s = check(x, packed, experts, out_features, out, parallel, &one); !s.ok()) return s;
  const int64_t results = experts.shape.numel();
  if (results == 0) return {};
  const Layout& layout = one.layout;
  if (layout.format != Format::panel16) return experts_of_vendor(x, packed, experts, one, out, parallel);
  const int64_t count = packed.shape.size[0], per_row = experts.shape.size[experts.shape.ndim - 1];
  const int64_t rows = results / per_row;
  RowKinds kinds;
  kinds.add(layout);
  kinds.of[0].group_sums = true;  // some experts may be affine
  QuantizedRows quantized(x, kinds, choose_quantize(active_isa()));
  const int64_t row_bytes = per_row * (quantized.bytes(1) + 16);
  const int64_t rows_at_once = rows * row_bytes <= kScratchBytes ? rows : at_least_1(kScratchBytes / row_bytes);
  const int64_t chunk = rows_at_once * per_row;
  // Number of rows of a part.
  const int64_t most = at_least_1(kBandBytes / (layout.planes() * layout.blocks * kBlockInputs) / kBandRows) * kBandRows;
  const int64_t item = layout.two_planes ? planes_bytes(1, 1) / kPanelRows : element_bytes(x.type);  // per result in a tile
  const int64_t tile_rows = chunk < most ? chunk : most;
  const int64_t panel_bytes = tile_rows * kPanelRows * item;
  const int64_t tile_bytes = panel_bytes < kTileBytes ? kTileBytes : panel_bytes;
  const int64_t input_bytes = quantized.row_bytes();
  const int64_t worker_bytes = kLinearScratchBytes + aligned(tile_bytes) + input_bytes;
  const Parallel threads = results * layout.k * layout.n < kParallelProducts ? Parallel() : parallel;

  Memory memory;
  Pieces size(nullptr);
  memory.place(size, count, results, chunk, quantized.bytes(chunk), threads.threads * worker_bytes);
  const Scratch scratch(size.bytes());
  if (scratch.data() == nullptr) {
    return Status::no_memory("no memory for %" PRId64 " bytes of quantized activations", size.bytes());
  }
  Pieces pieces(scratch.data());
  memory.place(pieces, count, results, chunk, quantized.bytes(chunk), threads.threads * worker_bytes);
  quantized.place(memory.rows, chunk);
  if (Status s = read_chosen(x, packed, experts, one, memory); !s.ok()) return s;

  const Call call(x, packed, out, per_row, memory, quantized);
  std::unique_ptr<char, FreeAligned> more;  // scratch memory for kernels
  int64_t scratch_bytes = kLinearScratchBytes;
  for (int64_t first = 0; first < results; first += chunk) {
    const int64_t here = results - first < chunk ? results - first : chunk;
    const int64_t parts = sort_by_expert(memory, count, first, here, most);
    for (ExpertRows* part = memory.parts; part < memory.parts + parts; ++part) {
      choose_kernels(memory.layouts[part->expert], part->rows, threads.threads, &part->kernel, &part->beside);
    }
    if (Status s = make_scratch(memory, parts, threads.threads, &scratch_bytes, &more); !s.ok()) return s;
    const int64_t begin = first / per_row;
    parallel_1d(here / per_row * layout.k < kParallelValues ? Parallel() : threads, here / per_row,
                at_least_1(kClaimValues / layout.k), [&](int worker, int64_t from, int64_t to) {
                  char* const worker_memory = memory.workers + worker * worker_bytes + worker_bytes - input_bytes;
                  for (int64_t row = begin + from; row < begin + to; ++row) call.quantize(row, first, worker_memory);
                });

    const int64_t step = panels_per_tile(memory, parts, here, layout, item, tile_bytes, threads.threads);
    const int64_t tiles = (layout.panels + step - 1) / step;  // per part
    parallel_1d(threads, parts * tiles, 1, [&](int worker, int64_t from, int64_t to) {
      char* const worker_memory = memory.workers + worker * worker_bytes;
      char* const kernel_scratch = more == nullptr ? worker_memory : more.get() + worker * scratch_bytes;
      for (int64_t tile = from; tile < to; ++tile) {
        const int64_t panel = tile % tiles * step;
        const int64_t end = panel + step < layout.panels ? panel + step : layout.panels;
        const ExpertRows& part = memory.parts[tile / tiles];
        call.run(part, panel, end, worker < sme_threads() ? *part.kernel : *part.beside, worker_memory, kernel_scratch);
      }
    });
  }
  return {};
}

}  // namespace lowbit
