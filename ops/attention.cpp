#include <atomic>
#include <new>

#include "../kernels/registry.h"
#include "attention_checks.h"
#include "check.h"
#include "rows.h"
#include "schedule.h"
#include "scores.h"
#include "scratch.h"
#include "tiles.h"
#include "write_positions.h"

namespace lowbit {
namespace {

class Call {
 public:
  Call(const AttentionSizes& sizes, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
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

  // New positions [begin, end) of one head of the caches.
  void write(int64_t cache_head, int64_t begin, int64_t end) const {
    AttentionWriteArgs args{element(k_, cache_head, begin), element(v_, cache_head, begin), k_.stride[3], v_.stride[3],
                            keys(cache_head), values(cache_head), key_scales(cache_head), value_scales(cache_head),
                            sizes_.start + begin, dtype_of(q_.type), cache_, sizes_.width, sizes_.value_width};
    args.k_position_step = k_.stride[2];
    args.v_position_step = v_.stride[2];
    write_positions(kernel_, args, end - begin);
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

  const AttentionSizes& sizes_;
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

Status attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                 const TensorView& v_cache, const TensorView& start, const Scores& given, const TensorView& out,
                 const Parallel& parallel) {
  AttentionSizes sizes;
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  if (Status status = check_attention(q, k, v, k_cache, v_cache, start, given, out, &sizes); !status.ok()) return status;
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
    while (begin < end) {  // a single thread gets the rows of all heads
      const int64_t head = begin / positions, next = (head + 1) * positions;
      call.write(head, begin % positions, (next < end ? next : end) - head * positions);
      begin = next;
    }
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

}  // namespace lowbit
