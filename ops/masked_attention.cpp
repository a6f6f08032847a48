// Attention without caches, for encoders. Each unit of work copies the visible keys and values of one head to the layout of the
// kernels, and runs rows of queries over them. Padding is skipped, so a text's bits do not depend on it.
#include <cmath>
#include <cstring>

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

constexpr int64_t kMostPositions = int64_t{1} << 30;

// A computed query: its position, and its range of visible keys.
struct Query {
  int32_t position, begin, end;
};

// The visible positions of one text.
struct Text {
  int32_t* keys;  // positions of the visible keys
  Query* queries;
  int64_t key_count, query_count;
};

// Reads text `b` of `bounds` once: another thread may write to it meanwhile.
Status read_text(const TensorView& bounds, int64_t b, int32_t* before, Text* text) {
  const int64_t positions = bounds.shape.size[1];
  const int32_t* const rows = static_cast<const int32_t*>(bounds.data) + b * positions * 3;
  for (int64_t i = 0; i < positions; ++i) {
    int32_t row[3];
    std::memcpy(row, rows + i * 3, sizeof row);
    __asm__ volatile("" : "+m"(row));
    if (row[0] < 0 || row[0] > 1 || row[1] < 0 || row[1] > row[2] || row[2] > positions) {
      return Status::error("bounds of position %" PRId64 " of text %" PRId64 " are %d, %d and %d; expected 0 or 1, and "
                           "0 <= begin <= end <= %" PRId64, i, b, row[0], row[1], row[2], positions);
    }
    before[i] = static_cast<int32_t>(text->key_count);
    if (row[0] == 0) continue;
    text->keys[text->key_count++] = static_cast<int32_t>(i);
    text->queries[text->query_count++] = {static_cast<int32_t>(i), row[1], row[2]};
  }
  before[positions] = static_cast<int32_t>(text->key_count);
  int64_t kept = 0;
  for (int64_t i = 0; i < text->query_count; ++i) {
    Query query = text->queries[i];
    query.begin = before[query.begin];
    query.end = before[query.end];
    if (query.begin == query.end) continue;
    if (kept > 0 && (query.begin < text->queries[kept - 1].begin || query.end < text->queries[kept - 1].end)) {
      return Status::error("bounds of position %d of text %" PRId64 " begin or end before those of an earlier position",
                           static_cast<int>(query.position), b);
    }
    text->queries[kept++] = query;
  }
  text->query_count = kept;
  return {};
}

}  // namespace

Status masked_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView* bounds, double scale,
                        double softcap, const TensorView& out, const Parallel& parallel) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  Shape out_shape;
  if (Status status = attention_shape(q, v, &out_shape); !status.ok()) return status;
  const int64_t batch = q.shape.size[0], heads = q.shape.size[1], positions = q.shape.size[2], width = q.shape.size[3];
  const int64_t kv_heads = v.shape.size[1], length = v.shape.size[2], value_width = v.shape.size[3];
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    return Status::error("q has %" PRId64 " heads; expected 1 or more times %" PRId64 ", the heads of k and v", heads,
                         kv_heads);
  }
  if (positions > kMostPositions || length > kMostPositions) {
    return Status::error("there are %" PRId64 " queries and %" PRId64 " keys; expected at most 2^30", positions, length);
  }
  if (Status status = check_rows_of("q", q, q.type, q.shape); !status.ok()) return status;
  if (Status status = check_rows_of("k", k, q.type, {4, {batch, kv_heads, length, width}}); !status.ok()) return status;
  if (Status status = check_rows_of("v", v, q.type, {4, {batch, kv_heads, length, value_width}}); !status.ok()) return status;
  if (bounds != nullptr) {
    if (positions != length) {
      return Status::error("there are %" PRId64 " queries and %" PRId64 " keys; expected equal numbers with bounds", positions,
                           length);
    }
    if (Status status = check_tensor("bounds", *bounds, ElementType::i32, {3, {batch, positions, 3}}); !status.ok()) {
      return status;
    }
  }
  if (!(std::fabs(scale) <= kLargestScale) ||
      (softcap != 0.0 && !(softcap >= kSmallestSoftcap && softcap <= kLargestScale))) {
    return Status::error("scale is %g and softcap %g; expected a scale from -%g to %g and a softcap from %g to %g, or 0", scale,
                         softcap, kLargestScale, kLargestScale, kSmallestSoftcap, kLargestScale);
  }
  if (Status status = check_tensor("out", out, q.type, out_shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"q", &q}, {"k", &k}, {"v", &v}, {"bounds", bounds}}); !status.ok()) {
    return status;
  }
  const int64_t item = element_bytes(q.type);
  if (out_shape.numel() == 0) return {};
  if (length == 0) {
    std::memset(out.data, 0, static_cast<size_t>(out_shape.numel() * item));
    return {};
  }
  const DefaultFloats floats;
  __asm__ volatile("" : "+m"(scale), "+m"(softcap));  // the compiler must not round their products before the line above
  const float factor = score_factor(scale, softcap), cap = score_cap(softcap);

  const int64_t group = heads / kv_heads, rows = positions * group;
  const int64_t products = batch * heads * positions * length * (width + value_width);
  const Parallel threads = products < kParallelProducts ? Parallel() : parallel;
  // Rows per unit: all rows of a head, or fewer if there are fewer heads than the threads need. Each unit copies the keys that
  // it sees.
  const int64_t wanted = (4 * threads.threads + batch * kv_heads - 1) / (batch * kv_heads);
  const int64_t tiles = (rows + kAttentionRows - 1) / kAttentionRows;
  const int64_t unit_tiles = threads.threads == 1 ? tiles : at_least_1(tiles / wanted);
  const int64_t units = (tiles + unit_tiles - 1) / unit_tiles;

  const int64_t scratch_bytes = aligned(attention_scratch(width, value_width) * static_cast<int64_t>(sizeof(float)));
  const int64_t padded = rounded_up(length, kKeyPositions);
  const int64_t key_bytes = aligned(padded * width * item);
  const int64_t worker_bytes = scratch_bytes + key_bytes + aligned(padded * value_width * item);
  const int64_t text_count = bounds == nullptr ? 0 : batch;
  const int64_t text_bytes = aligned(text_count * static_cast<int64_t>(sizeof(Text)));
  const int64_t list_bytes = aligned((2 * positions + 1) * 4) + aligned(positions * static_cast<int64_t>(sizeof(Query)));
  const int64_t bytes = text_bytes + text_count * list_bytes + threads.threads * worker_bytes;
  const Scratch memory(bytes);
  if (memory.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of attention", bytes);
  Text* const texts = reinterpret_cast<Text*>(memory.data());
  for (int64_t b = 0; b < text_count; ++b) {
    char* const lists = memory.data() + text_bytes + b * list_bytes;
    int32_t* const before = reinterpret_cast<int32_t*>(lists);
    texts[b] = {before + positions + 1, reinterpret_cast<Query*>(lists + aligned((2 * positions + 1) * 4)), 0, 0};
    if (Status status = read_text(*bounds, b, before, &texts[b]); !status.ok()) return status;
  }
  char* const workers = memory.data() + text_bytes + text_count * list_bytes;
  const AttentionKernel& kernel = choose_attention(active_isa());
  const auto at = [item](const TensorView& tensor, int64_t b, int64_t head, int64_t position) {
    const int64_t offset = b * tensor.stride[0] + head * tensor.stride[1] + position * tensor.stride[2];
    return static_cast<char*>(tensor.data) + offset * item;
  };
  const auto output = [&](int64_t b, int64_t position, int64_t head) {
    return static_cast<char*>(out.data) + ((b * positions + position) * heads + head) * value_width * item;
  };

  const auto run_unit = [&](int64_t b, int64_t kv_head, int64_t unit, char* worker) {
    const Text* const text = bounds == nullptr ? nullptr : &texts[b];
    const auto query = [&](int64_t i) {
      return text == nullptr ? Query{static_cast<int32_t>(i), 0, static_cast<int32_t>(length)} : text->queries[i];
    };
    const int64_t query_count = text == nullptr ? positions : text->query_count;
    if (unit == 0 && query_count < positions) {  // positions that are not computed are 0
      for (int64_t i = 0, next = 0; i < positions; ++i) {
        if (next < query_count && query(next).position == i) {
          ++next;
          continue;
        }
        std::memset(output(b, i, kv_head * group), 0, static_cast<size_t>(group * value_width * item));
      }
    }
    const int64_t first = unit * unit_tiles * kAttentionRows;
    int64_t last = first + unit_tiles * kAttentionRows;
    if (last > query_count * group) last = query_count * group;
    if (first >= last) return;

    char *const keys = worker + scratch_bytes, *const values = keys + key_bytes;
    const int64_t begin = query(first / group).begin, end = query((last - 1) / group).end;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t position = text == nullptr ? i : text->keys[i];
      kernel.write({at(k, b, kv_head, position), at(v, b, kv_head, position), 1, 1, keys, values, nullptr, nullptr, i,
                    dtype_of(q.type), cache_type_of(dtype_of(q.type)), width, value_width, kernel.context});
    }
    for (int64_t tile = first; tile < last; tile += kAttentionRows) {
      const void* q_rows[kAttentionRows];
      void* out_rows[kAttentionRows];
      int64_t begins[kAttentionRows], ends[kAttentionRows];
      const int64_t count = last - tile < kAttentionRows ? last - tile : kAttentionRows;
      for (int64_t r = 0; r < count; ++r) {
        const Query one = query((tile + r) / group);
        const int64_t head = kv_head * group + (tile + r) % group;
        q_rows[r] = at(q, b, head, one.position);
        out_rows[r] = output(b, one.position, head);
        begins[r] = one.begin;
        ends[r] = one.end;
      }
      kernel.run({count, q_rows, out_rows, begins, ends, nullptr, keys, values, nullptr, nullptr, dtype_of(q.type),
                  cache_type_of(dtype_of(q.type)), width, value_width, factor, cap, reinterpret_cast<float*>(worker), nullptr,
                  kernel.context});
    }
  };
  parallel_1d(threads, batch * kv_heads * units, 1, [&](int worker, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run_unit(i / units / kv_heads, i / units % kv_heads, i % units, workers + worker * worker_bytes);
    }
  });
  return {};
}

}  // namespace lowbit
