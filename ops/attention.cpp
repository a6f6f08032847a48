#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "rows.h"
#include "schedule.h"
#include "scores.h"
#include "scratch.h"
#include "tiles.h"

namespace lowbit {
namespace {

// The sizes of a call.
struct Sizes {
  int64_t batch, heads, kv_heads, positions, width, value_width;
  int64_t max_length, start;
  CacheType cache;
};

// A head has the codes of all positions, then their float32 scales, so a position takes 4 more bytes.
constexpr int64_t kScaleBytes = 4;
// A byte has two 4-bit codes, and a vector of the kernels has 16 bytes of codes.
constexpr int64_t kRotatedStep = 32;

int64_t scale_bytes(CacheType cache) { return has_scales(cache) ? kScaleBytes : 0; }

// The cache type for keys or values of that width. The number of int8 bytes per position determines it: width + 4 for int8,
// width / 2 + 4 for 4 bits.
CacheType stored_type(const TensorView& cache, int64_t width) {
  if (cache.type != ElementType::i8) return cache_type_of(dtype_of(cache.type));
  const bool halves = cache.shape.ndim == 4 && cache.shape.size[3] == width / 2 + kScaleBytes;
  return halves && width % kRotatedStep == 0 ? CacheType::i4 : CacheType::i8;
}

// The last dimension of a cache for that width.
int64_t cache_width(CacheType type, int64_t width) {
  return (type == CacheType::i4 ? width / 2 : width) + scale_bytes(type);
}

// Checks that the last dimension of a cache of codes has one of the allowed sizes.
Status check_codes(const char* name, const TensorView& cache, int64_t width) {
  Shape expected = cache.shape;
  expected.size[3] = cache_width(stored_type(cache, width), width);
  if (cache.type != ElementType::i8 || cache.shape.ndim != 4 || cache.shape.size[3] == expected.size[3]) return {};
  const ShapeText found = describe(cache.shape), wanted = describe(expected);
  if (width % kRotatedStep != 0) {
    return Status::error("%s has shape %s; expected %s: 4 bits are for widths that are multiples of %d", name, found.text,
                         wanted.text, static_cast<int>(kRotatedStep));
  }
  return Status::error("%s has shape %s; expected %s, or %" PRId64 " for 4 bits", name, found.text, wanted.text,
                       cache_width(CacheType::i4, width));
}

// For queries and values that attention_shape() has checked.
Status check_caches(const TensorView& q, const TensorView& v, const TensorView& k_cache, const TensorView& v_cache,
                    CacheType* type) {
  if (!is_activation_type(k_cache.type) && k_cache.type != ElementType::i8) {
    return Status::error("k_cache has dtype %s; expected float32, bfloat16, float16 or int8", name_of(k_cache.type));
  }
  if (Status s = check_dimensions("k_cache", k_cache, 4, "[batch, kv_heads, max_length, width]"); !s.ok()) return s;
  const int64_t width = q.shape.size[3], value_width = v.shape.size[3];
  const CacheType keys = stored_type(k_cache, width), values = stored_type(v_cache, value_width);
  Shape expected = k_cache.shape;
  expected.size[0] = q.shape.size[0];
  expected.size[3] = cache_width(keys, width);
  if (Status status = check_codes("k_cache", k_cache, width); !status.ok()) return status;
  if (Status status = check_tensor("k_cache", k_cache, k_cache.type, expected); !status.ok()) return status;
  if (k_cache.shape.size[1] < 1) {
    return Status::error("k_cache has shape %s; expected a head", describe(k_cache.shape).text);
  }
  if (k_cache.shape.size[2] % kKeyPositions != 0) {
    return Status::error("k_cache has shape %s; expected a max_length that is a multiple of %d",
                         describe(k_cache.shape).text, static_cast<int>(kKeyPositions));
  }
  if (v_cache.type == k_cache.type) {
    if (Status status = check_codes("v_cache", v_cache, value_width); !status.ok()) return status;
  }
  expected.size[3] = cache_width(values, value_width);
  if (Status status = check_tensor("v_cache", v_cache, k_cache.type, expected); !status.ok()) return status;
  if (keys == CacheType::i4 && values == CacheType::i8) {
    return Status::error("k_cache has 4-bit codes and v_cache has shape %s, int8; expected %" PRId64 " for 4 bits, or int8 "
                         "keys: rounding keys to 4 bits loses more than rounding values",
                         describe(v_cache.shape).text, cache_width(CacheType::i4, value_width));
  }
  *type = keys == CacheType::i8 && values == CacheType::i4 ? CacheType::i8_i4 : keys;
  return {};
}

// New keys or values: the number of positions of q, the number of heads of the cache.
Status check_new(const char* name, const TensorView& tensor, const TensorView& q, const TensorView& cache, int64_t width) {
  if (Status status = check_memory(name, tensor); !status.ok()) return status;
  if (tensor.type != q.type) {
    return Status::error("%s has dtype %s; expected %s, as q has", name, name_of(tensor.type), name_of(q.type));
  }
  Shape expected = q.shape;
  expected.size[1] = cache.shape.size[1];
  expected.size[3] = width;
  bool same = tensor.shape.ndim == 4;
  for (int d = 0; same && d < 4; ++d) same = tensor.shape.size[d] == expected.size[d];
  if (same) return {};
  return Status::error("%s has shape %s; expected %s", name, describe(tensor.shape).text, describe(expected).text);
}

Status check_scores(const Scores& scores, const TensorView& q) {
  if (!(std::fabs(scores.scale) <= kLargestScale)) {
    return Status::error("scale is %g; expected a number from -%g to %g", scores.scale, kLargestScale, kLargestScale);
  }
  if (scores.window < 0) return Status::error("window is %" PRId64 "; expected 1 or more, or 0 for none", scores.window);
  if (scores.softcap != 0.0 && !(scores.softcap >= kSmallestSoftcap && scores.softcap <= kLargestScale)) {
    return Status::error("softcap is %g; expected a number from %g to %g, or 0 for none", scores.softcap,
                         kSmallestSoftcap, kLargestScale);
  }
  if (scores.sinks == nullptr) return {};
  const TensorView& sinks = *scores.sinks;
  if (Status status = check_memory("sinks", sinks); !status.ok()) return status;
  if (sinks.type != q.type || sinks.shape.ndim != 1 || sinks.shape.size[0] != q.shape.size[1]) {
    return Status::error("sinks has dtype %s and shape %s; expected %s and [%" PRId64 "], a score for each head of q",
                         name_of(sinks.type), describe(sinks.shape).text, name_of(q.type), q.shape.size[1]);
  }
  return {};
}

Status check(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
             const TensorView& v_cache, const TensorView& start, const Scores& scores, const TensorView& out,
             Sizes* sizes) {
  Shape out_shape;
  CacheType cache;
  if (Status status = attention_shape(q, v, &out_shape); !status.ok()) return status;
  if (Status status = check_memory("q", q); !status.ok()) return status;
  if (Status status = check_caches(q, v, k_cache, v_cache, &cache); !status.ok()) return status;
  *sizes = {q.shape.size[0], q.shape.size[1],   k_cache.shape.size[1], q.shape.size[2],
            q.shape.size[3], out_shape.size[3], k_cache.shape.size[2], 0, cache};
  if (Status status = check_new("k", k, q, k_cache, sizes->width); !status.ok()) return status;
  if (Status status = check_new("v", v, q, v_cache, sizes->value_width); !status.ok()) return status;
  if (Status status = check_scores(scores, q); !status.ok()) return status;
  if (sizes->heads < 1 || sizes->heads % sizes->kv_heads != 0) {
    return Status::error("q has %" PRId64 " heads; expected 1 or more times %" PRId64 ", the heads of the caches",
                         sizes->heads, sizes->kv_heads);
  }
  if (Status status = check_tensor("out", out, q.type, out_shape); !status.ok()) return status;
  if (Status status = read_start(start, &sizes->start); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}, {"k_cache", &k_cache}, {"v_cache", &v_cache}},
                                  {{"q", &q}, {"k", &k}, {"v", &v}, {"sinks", scores.sinks}, {"start", &start}});
      !status.ok()) {
    return status;
  }
  const int64_t room = sizes->max_length - sizes->positions;
  if (sizes->start < 0 || sizes->start > room) {
    return Status::out_of_range("start is %" PRId64 " with %" PRId64 " new positions; expected 0 to %" PRId64
                                ", the max_length of %" PRId64 " less the new ones",
                                sizes->start, sizes->positions, room, sizes->max_length);
  }
  return {};
}

class Call {
 public:
  Call(const Sizes& sizes, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
       const TensorView& v_cache, const Scores& scores, const TensorView& out)
      : sizes_(sizes), q_(q), k_(k), v_(v), k_cache_(static_cast<char*>(k_cache.data)),
        v_cache_(static_cast<char*>(v_cache.data)), out_(static_cast<char*>(out.data)), item_(element_bytes(q.type)),
        cache_(sizes.cache), group_(sizes.heads / sizes.kv_heads), scores_(scores),
        factor_(score_factor(scores.scale, scores.softcap)), cap_(score_cap(scores.softcap)),
        kernel_(choose_attention(active_isa())) {}

  int64_t rows() const { return sizes_.positions * group_; }

  // Bytes of memory per worker.
  int64_t worker_bytes() const {
    return scratch_bytes() + (q_.stride[3] == 1 ? 0 : aligned(kAttentionRows * sizes_.width * item_));
  }

  // New position `i` of one head of the caches.
  void write(int64_t cache_head, int64_t i) const {
    kernel_.write({element(k_, cache_head, i), element(v_, cache_head, i), k_.stride[3], v_.stride[3], keys(cache_head),
                   values(cache_head), key_scales(cache_head), value_scales(cache_head), sizes_.start + i,
                   dtype_of(q_.type), cache_, sizes_.width, sizes_.value_width, kernel_.context});
  }

  // Computes rows [begin, end) of the queries of one KV head, at most kAttentionRows, ordered by position and then by head of
  // the group. `memory` must have worker_bytes(), 64-byte aligned.
  void attend(int64_t cache_head, int64_t begin, int64_t end, char* memory) const {
    const Rows rows(*this, cache_head, begin, end, memory);
    kernel_.run(rows.arguments(nullptr));
  }

  // The same for the rows of one position and one of its spans; returns the partial result for `join`.
  void attend_span(int64_t cache_head, int64_t begin, int64_t end, int64_t span, char* memory, float* partial) const {
    Rows rows(*this, cache_head, begin, end, memory);
    const int64_t first = span * kAttentionSpan, last = first + kAttentionSpan;
    if (rows.begins[0] < first) rows.has_sinks = false;
    for (int64_t r = 0; r < end - begin; ++r) {
      if (rows.begins[r] < first) rows.begins[r] = first;
      if (rows.ends[r] > last) rows.ends[r] = last;
    }
    kernel_.run(rows.arguments(partial));
  }

  void join(int64_t cache_head, int64_t begin, int64_t end, int64_t spans, float* partials) const {
    void* out[kAttentionRows];
    for (int64_t row = begin; row < end; ++row) out[row - begin] = output(cache_head, row);
    kernel_.join({end - begin, spans, partials, out, dtype_of(q_.type), cache_, sizes_.value_width, kernel_.context});
  }

  // The spans that rows of a single position see: the first, and the one after the last.
  int64_t first_span() const {
    const int64_t end = sizes_.start + 1;
    return (scores_.window > 0 && scores_.window < end ? end - scores_.window : 0) / kAttentionSpan;
  }
  int64_t end_span() const { return sizes_.start / kAttentionSpan + 1; }

 private:
  // The kernel's arguments for some rows.
  struct Rows {
    const Call& call;
    int64_t cache_head, count;
    const void* q[kAttentionRows];
    void* out[kAttentionRows];
    int64_t begins[kAttentionRows]{}, ends[kAttentionRows]{};
    float sinks[kAttentionRows];
    bool has_sinks;
    float* scratch;

    Rows(const Call& call, int64_t cache_head, int64_t begin, int64_t end, char* memory)
        : call(call), cache_head(cache_head), count(end - begin), has_sinks(call.scores_.sinks != nullptr),
          scratch(reinterpret_cast<float*>(memory)) {
      const TensorView& from = call.q_;
      const int64_t width = call.sizes_.width, item = call.item_, group = call.group_, window = call.scores_.window;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t i = row / group, head = call.head_of(cache_head, row), at = row - begin;
        q[at] = static_cast<const char*>(from.data) +
                (cache_head / call.sizes_.kv_heads * from.stride[0] + head * from.stride[1] + i * from.stride[2]) * item;
        if (from.stride[3] != 1) {
          char* const copy = memory + call.scratch_bytes() + at * width * item;
          gather(item, q[at], from.stride[3], copy, width);
          q[at] = copy;
        }
        out[at] = call.output(cache_head, row);
        ends[at] = call.sizes_.start + i + 1;
        begins[at] = window > 0 && window < ends[at] ? ends[at] - window : 0;
        if (has_sinks) sinks[at] = call.sink(head);
      }
    }

    AttentionArgs arguments(float* partial) const {
      return {count, q, out, begins, ends, has_sinks ? sinks : nullptr, call.keys(cache_head), call.values(cache_head),
              call.key_scales(cache_head), call.value_scales(cache_head), dtype_of(call.q_.type), call.cache_,
              call.sizes_.width, call.sizes_.value_width, call.factor_, call.cap_, scratch, partial, call.kernel_.context};
    }
  };

  // The query head of a row of a KV head.
  int64_t head_of(int64_t cache_head, int64_t row) const {
    return cache_head % sizes_.kv_heads * group_ + row % group_;
  }
  void* output(int64_t cache_head, int64_t row) const {
    const int64_t batch = cache_head / sizes_.kv_heads;
    return out_ + ((batch * sizes_.positions + row / group_) * sizes_.heads + head_of(cache_head, row)) *
                      sizes_.value_width * item_;
  }
  int64_t scratch_bytes() const {
    return aligned(attention_scratch(sizes_.width, sizes_.value_width) * static_cast<int64_t>(sizeof(float)));
  }
  int64_t key_bytes() const { return cache_bytes(key_type(cache_), sizes_.max_length * sizes_.width); }
  int64_t value_bytes() const { return cache_bytes(value_type(cache_), sizes_.max_length * sizes_.value_width); }
  int64_t head_scales() const { return scale_bytes(cache_) * sizes_.max_length; }
  char* keys(int64_t cache_head) const { return k_cache_ + cache_head * (key_bytes() + head_scales()); }
  char* values(int64_t cache_head) const { return v_cache_ + cache_head * (value_bytes() + head_scales()); }
  char* key_scales(int64_t cache_head) const {
    return has_scales(cache_) ? keys(cache_head) + key_bytes() : nullptr;
  }
  char* value_scales(int64_t cache_head) const {
    return has_scales(cache_) ? values(cache_head) + value_bytes() : nullptr;
  }
  float sink(int64_t head) const {
    const TensorView& sinks = *scores_.sinks;
    const double score = load_as_f32(sinks.data, dtype_of(sinks.type), head * sinks.stride[0]);
    return static_cast<float>(score * kLog2E);
  }
  const char* element(const TensorView& tensor, int64_t cache_head, int64_t i) const {
    const int64_t batch = cache_head / sizes_.kv_heads, head = cache_head % sizes_.kv_heads;
    return static_cast<const char*>(tensor.data) +
           (batch * tensor.stride[0] + head * tensor.stride[1] + i * tensor.stride[2]) * item_;
  }

  const Sizes& sizes_;
  const TensorView &q_, &k_, &v_;
  char *k_cache_, *v_cache_, *out_;
  int64_t item_;
  CacheType cache_;
  int64_t group_;
  const Scores& scores_;
  float factor_, cap_;
  const AttentionKernel& kernel_;
};

}  // namespace

Status attention_shape(const TensorView& q, const TensorView& v, Shape* out) {
  if (!is_activation_type(q.type)) {
    return Status::error("q has dtype %s; expected float32, bfloat16 or float16", name_of(q.type));
  }
  for (const auto& [name, tensor] : {NamedTensor{"q", &q}, NamedTensor{"v", &v}}) {
    constexpr char kExpected[] = "[batch, heads, positions, width]";
    if (Status status = check_dimensions(name, *tensor, 4, kExpected); !status.ok()) return status;
    const int64_t width = tensor->shape.size[3];
    if (width < kKeyPositions || width > kAttentionWidth || width % kKeyPositions != 0) {
      return Status::error("%s has width %" PRId64 "; expected a multiple of %d from %d to %d", name, width,
                           static_cast<int>(kKeyPositions), static_cast<int>(kKeyPositions), static_cast<int>(kAttentionWidth));
    }
  }
  *out = {4, {q.shape.size[0], q.shape.size[2], q.shape.size[1], v.shape.size[3]}};
  return {};
}

Status attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                 const TensorView& v_cache, const TensorView& start, const Scores& given, const TensorView& out,
                 const Parallel& parallel) {
  Sizes sizes;
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  if (Status status = check(q, k, v, k_cache, v_cache, start, given, out, &sizes); !status.ok()) return status;
  if (k.shape.numel() == 0) return {};
  const DefaultFloats floats;
  Scores scores = given;
  __asm__ volatile("" : "+m"(scores));  // the compiler must not round their products before the line above
  const Call call(sizes, q, k, v, k_cache, v_cache, scores, out);

  // A band of the grid is a KV head: its new positions are written before its queries run. The last rows, which see most
  // positions, are claimed first.
  const int64_t cache_heads = sizes.batch * sizes.kv_heads, rows = call.rows(), positions = sizes.positions;
  const int64_t length = sizes.start + positions;
  const int64_t seen = scores.window > 0 && scores.window < length ? scores.window : length;
  const int64_t row_products = seen * (sizes.width + sizes.value_width);
  Grid grid{};
  grid.rows = cache_heads * positions;
  grid.band_rows = positions;
  grid.prepare_rows = (1 + kClaimValues / sizes.width / kKeyPositions) * kKeyPositions;
  grid.columns = (rows + kAttentionRows - 1) / kAttentionRows;
  grid.least_columns = grid.most_columns = 1 + kClaimProducts / (row_products * kAttentionRows);
  const Parallel threads = rows * cache_heads * row_products < kParallelProducts ? Parallel() : parallel;
  // If one position has too few pieces for the threads, they also share its spans: a piece is a span of up to kAttentionRows
  // rows, and the thread that finishes the last span of these rows joins them.
  const int64_t tiles = grid.columns, first_span = call.first_span(), spans = call.end_span() - first_span;
  const bool by_spans = positions == 1 && spans > 1 && threads.threads > 1 && cache_heads * tiles < 4 * threads.threads;
  const int64_t partial = attention_partial(rows < kAttentionRows ? rows : kAttentionRows, sizes.value_width);
  const int64_t partials = by_spans ? cache_heads * tiles * spans : 0;
  using Ended = std::atomic<int64_t>;
  const int64_t bands_bytes = aligned(cache_heads * static_cast<int64_t>(sizeof(Band)));
  const int64_t ended_bytes = aligned((by_spans ? cache_heads * tiles : 0) * static_cast<int64_t>(sizeof(Ended)));
  const int64_t partial_bytes = partials * partial * static_cast<int64_t>(sizeof(float));
  const int64_t worker_bytes = call.worker_bytes();
  const int64_t bytes = bands_bytes + ended_bytes + partial_bytes + threads.threads * worker_bytes;
  const Scratch memory(bytes);
  if (memory.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of attention", bytes);
  Band* const bands = new (memory.data()) Band[static_cast<size_t>(cache_heads)];
  char* const workers = memory.data() + bands_bytes + ended_bytes + partial_bytes;
  const auto write = [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) call.write(row / positions, row % positions);
  };
  const auto rows_end = [&](int64_t first) { return first + kAttentionRows < rows ? first + kAttentionRows : rows; };
  if (by_spans) {
    Ended* const ended = new (memory.data() + bands_bytes) Ended[static_cast<size_t>(cache_heads * tiles)]();
    float* const results = reinterpret_cast<float*>(memory.data() + bands_bytes + ended_bytes);
    grid.columns = tiles * spans;
    grid.least_columns = grid.most_columns = 1;
    parallel_2d(threads, grid, bands, write, [&](int worker, int64_t cache_head, int64_t begin, int64_t end) {
      for (int64_t column = begin; column < end; ++column) {
        const int64_t tile = column / spans, span = column % spans, first = tile * kAttentionRows;
        const int64_t at = cache_head * tiles + tile;
        float* const row_results = results + at * spans * partial;
        // The last piece may have fewer rows.
        const int64_t size = attention_partial(rows_end(first) - first, sizes.value_width);
        call.attend_span(cache_head, first, rows_end(first), first_span + span, workers + worker * worker_bytes,
                         row_results + span * size);
        if (ended[at].fetch_add(1, std::memory_order_acq_rel) + 1 == spans) {
          call.join(cache_head, first, rows_end(first), spans, row_results);
        }
      }
    });
    return {};
  }
  parallel_2d(threads, grid, bands, write, [&](int worker, int64_t cache_head, int64_t begin, int64_t end) {
    char* const worker_memory = workers + worker * worker_bytes;
    for (int64_t column = begin; column < end; ++column) {
      const int64_t first = (grid.columns - 1 - column) * kAttentionRows;
      call.attend(cache_head, first, rows_end(first), worker_memory);
    }
  });
  return {};
}

namespace {

// A view of positions [begin, begin + count) of one text, or of all if `text` is below 0. `dim` is the dimension of positions.
TensorView part_of(TensorView view, int64_t text, int dim, int64_t begin, int64_t count) {
  const int64_t item = element_bytes(view.type);
  int64_t elements = begin * view.stride[dim];
  view.shape.size[dim] = count;
  if (text >= 0) {
    elements += text * view.stride[0];
    view.shape.size[0] = 1;
  }
  view.data = static_cast<char*>(view.data) + elements * item;
  return view;
}

// Moves positions [from, from + count) of every head to its beginning. Both must be multiples of a panel.
void move_to_front(const TensorView& cache, CacheType type, int64_t width, int64_t from, int64_t count) {
  const int64_t length = cache.shape.size[2], codes = cache_bytes(type, length * width);
  const int64_t bytes = codes + length * scale_bytes(type), heads = cache.shape.size[0] * cache.shape.size[1];
  for (int64_t head = 0; head < heads; ++head) {
    char* const at = static_cast<char*>(cache.data) + head * bytes;
    std::memmove(at, at + cache_bytes(type, from * width), static_cast<size_t>(cache_bytes(type, count * width)));
    if (has_scales(type)) {
      std::memmove(at + codes, at + codes + from * kScaleBytes, static_cast<size_t>(count * kScaleBytes));
    }
  }
}

Status check_held(const TensorView& held, int64_t max_length, int64_t values[2]) {
  if (Status status = check_tensor("held", held, ElementType::i64, {1, {2}}); !status.ok()) return status;
  std::memcpy(values, held.data, 2 * sizeof *values);
  if (values[0] >= 0 && values[0] % kAttentionSpan == 0 && values[1] >= values[0] && values[1] - values[0] <= max_length) {
    return {};
  }
  return Status::error("held is [%" PRId64 ", %" PRId64 "]; expected a multiple of %d, and a number up to %" PRId64 " larger",
                       values[0], values[1], static_cast<int>(kAttentionSpan), max_length);
}

}  // namespace

// The kernels see positions from `base` on, which is a multiple of a span, so they add in the same order as over all positions.
Status window_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                        const TensorView& v_cache, const TensorView& held, const TensorView& start, const Scores& scores,
                        const TensorView& out, const Parallel& parallel) {
  Shape shape;
  CacheType cache;
  if (Status status = attention_shape(q, v, &shape); !status.ok()) return status;
  if (Status status = check_memory("q", q); !status.ok()) return status;
  if (Status status = check_caches(q, v, k_cache, v_cache, &cache); !status.ok()) return status;
  if (Status status = check_tensor("out", out, q.type, shape); !status.ok()) return status;
  const int64_t positions = q.shape.size[2], length = k_cache.shape.size[2], window = scores.window;
  const int64_t room = window < 1 || window > length ? 0 : length - window - kAttentionSpan;
  if (room < kKeyPositions) {
    return Status::error("window is %" PRId64 " and k_cache has shape %s; expected a window of 1 or more, and a max_length of "
                         "%d more or longer", window, describe(k_cache.shape).text,
                         static_cast<int>(kAttentionSpan + kKeyPositions));
  }
  int64_t first = 0, stored[2];
  if (Status status = read_start(start, &first); !status.ok()) return status;
  if (Status status = check_held(held, length, stored); !status.ok()) return status;
  const int64_t needed = first > window - 1 ? first - window + 1 : 0;
  if (first < 0 || first > stored[1] || (first > 0 && needed < stored[0])) {
    return Status::out_of_range("start is %" PRId64 ", and the caches hold positions %" PRId64 " to %" PRId64 "; expected 0, "
                                "or a start whose %" PRId64 " positions before it are held",
                                first, stored[0], stored[1] - 1, window - 1);
  }
  int64_t base = first == 0 ? 0 : stored[0];
  int64_t at = 0;  // start of a piece in the caches
  const TensorView relative{&at, ElementType::i64, true, {1, {1}}, {1}};
  Sizes sizes;
  {  // everything except the call's length is checked before anything changes
    const TensorView one = part_of(q, -1, 2, 0, positions < room ? positions : room);
    TensorView first_out = out;
    first_out.shape.size[1] = one.shape.size[2];
    int64_t stride = 1;
    for (int d = 3; d >= 0; --d) {
      first_out.stride[d] = stride;
      stride *= first_out.shape.size[d];
    }
    if (k.shape.ndim != 4 || v.shape.ndim != 4 || k.shape.size[2] != positions || v.shape.size[2] != positions) {
      return Status::error("k has shape %s and v %s; expected %" PRId64 " positions, as q has", describe(k.shape).text,
                           describe(v.shape).text, positions);
    }
    if (Status status = check(one, part_of(k, -1, 2, 0, one.shape.size[2]), part_of(v, -1, 2, 0, one.shape.size[2]), k_cache,
                              v_cache, relative, scores, first_out, &sizes);
        !status.ok()) {
      return status;
    }
    // `start` may be a part of `held`, so it was read before `held` is written.
    if (Status status = check_apart({{"out", &out}, {"k_cache", &k_cache}, {"v_cache", &v_cache}, {"held", &held}},
                                    {{"q", &q}, {"k", &k}, {"v", &v}, {"sinks", scores.sinks}});
        !status.ok()) {
      return status;
    }
    if (Status s = check_apart({{"out", &out}, {"k_cache", &k_cache}, {"v_cache", &v_cache}}, {{"start", &start}}); !s.ok()) {
      return s;
    }
  }
  const int64_t texts = q.shape.size[0];
  for (int64_t done = 0; done < positions;) {
    const int64_t count = positions - done < room ? positions - done : room, now = first + done;
    if (now + count - base > length) {
      const int64_t seen = now > window - 1 ? now - window + 1 : 0, moved = seen / kAttentionSpan * kAttentionSpan - base;
      const int64_t kept = (now - base - moved + kKeyPositions - 1) / kKeyPositions * kKeyPositions;
      move_to_front(k_cache, key_type(sizes.cache), sizes.width, moved, kept);
      move_to_front(v_cache, value_type(sizes.cache), sizes.value_width, moved, kept);
      base += moved;
    }
    at = now - base;
    const bool whole = count == positions;
    for (int64_t text = whole ? -1 : 0; text < (whole ? 0 : texts); ++text) {
      const TensorView keys = whole ? k_cache : part_of(k_cache, text, 2, 0, length);
      const TensorView values = whole ? v_cache : part_of(v_cache, text, 2, 0, length);
      const Status status =
          attention(part_of(q, text, 2, done, count), part_of(k, text, 2, done, count), part_of(v, text, 2, done, count), keys,
                    values, relative, scores, part_of(out, text, 1, done, count), parallel);
      if (!status.ok()) return status;
    }
    done += count;
    const int64_t held_now[2] = {base, first + done};
    std::memcpy(held.data, held_now, sizeof held_now);
  }
  return {};
}

}  // namespace lowbit
