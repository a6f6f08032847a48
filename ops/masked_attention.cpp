// Attention without caches, for encoders. The visible keys and values of a head are copied once to the layout of the kernels,
// and rows of queries run over them. Padding is skipped, so a text's bits do not depend on it.
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
#include "write_positions.h"

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
  // Threads claim heads if there are enough of them, and reuse their memory for keys and values. Otherwise they share the
  // heads, and all heads are copied before.
  const int64_t all_heads = batch * kv_heads, tiles = (rows + kAttentionRows - 1) / kAttentionRows;
  const bool by_heads = threads.threads == 1 || all_heads >= 4 * threads.threads;

  const int64_t scratch_bytes = aligned(attention_scratch(width, value_width) * static_cast<int64_t>(sizeof(float)));
  const int64_t padded = rounded_up(length, kKeyPositions);
  const int64_t key_bytes = aligned(padded * width * item);
  const int64_t head_bytes = key_bytes + aligned(padded * value_width * item);
  const int64_t copies = by_heads ? threads.threads : all_heads;
  const int64_t bands_bytes = by_heads ? 0 : aligned(all_heads * static_cast<int64_t>(sizeof(Band)));
  const int64_t text_count = bounds == nullptr ? 0 : batch;
  const int64_t text_bytes = aligned(text_count * static_cast<int64_t>(sizeof(Text)));
  const int64_t list_bytes = aligned((2 * positions + 1) * 4) + aligned(positions * static_cast<int64_t>(sizeof(Query)));
  const int64_t bytes =
      bands_bytes + text_bytes + text_count * list_bytes + copies * head_bytes + threads.threads * scratch_bytes;
  const Scratch memory(bytes);
  if (memory.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of attention", bytes);
  Text* const texts = reinterpret_cast<Text*>(memory.data() + bands_bytes);
  for (int64_t b = 0; b < text_count; ++b) {
    char* const lists = memory.data() + bands_bytes + text_bytes + b * list_bytes;
    int32_t* const before = reinterpret_cast<int32_t*>(lists);
    texts[b] = {before + positions + 1, reinterpret_cast<Query*>(lists + aligned((2 * positions + 1) * 4)), 0, 0};
    if (Status status = read_text(*bounds, b, before, &texts[b]); !status.ok()) return status;
  }
  char* const copied = memory.data() + bands_bytes + text_bytes + text_count * list_bytes;
  char* const scratches = copied + copies * head_bytes;
  const AttentionKernel& kernel = choose_attention(active_isa());
  const auto at = [item](const TensorView& tensor, int64_t b, int64_t head, int64_t position) {
    const int64_t offset = b * tensor.stride[0] + head * tensor.stride[1] + position * tensor.stride[2];
    return static_cast<char*>(tensor.data) + offset * item;
  };
  const auto output = [&](int64_t b, int64_t position, int64_t head) {
    return static_cast<char*>(out.data) + ((b * positions + position) * heads + head) * value_width * item;
  };

  const auto text_of = [&](int64_t head) { return bounds == nullptr ? nullptr : &texts[head / kv_heads]; };
  // Copies visible keys and values [begin, end) of a head.
  const auto copy = [&](int64_t head, int64_t begin, int64_t end, char* to) {
    const Text* const text = text_of(head);
    if (text != nullptr && end > text->key_count) end = text->key_count;
    while (begin < end) {
      const int64_t first = text == nullptr ? begin : text->keys[begin];
      int64_t count = 1;  // of adjacent positions
      while (begin + count < end && (text == nullptr || text->keys[begin + count] == first + count)) ++count;
      const int64_t b = head / kv_heads, kv_head = head % kv_heads;
      AttentionWriteArgs args{at(k, b, kv_head, first), at(v, b, kv_head, first), 1, 1, to, to + key_bytes, nullptr, nullptr,
                              begin, dtype_of(q.type), cache_type_of(dtype_of(q.type)), width, value_width};
      args.k_position_step = k.stride[2];
      args.v_position_step = v.stride[2];
      write_positions(kernel, args, count);
      begin += count;
    }
  };
  // Computes tiles [begin, end) of a head, of kAttentionRows rows each.
  const auto run_tiles = [&](int64_t kv_head, int64_t begin, int64_t end, const char* keys, float* scratch) {
    const Text* const text = text_of(kv_head);
    const int64_t b = kv_head / kv_heads, first_head = kv_head % kv_heads * group;
    const auto query = [&](int64_t i) {
      return text == nullptr ? Query{static_cast<int32_t>(i), 0, static_cast<int32_t>(length)} : text->queries[i];
    };
    const int64_t query_count = text == nullptr ? positions : text->query_count;
    if (begin == 0 && query_count < positions) {  // positions that are not computed are 0
      for (int64_t i = 0, next = 0; i < positions; ++i) {
        if (next < query_count && query(next).position == i) {
          ++next;
          continue;
        }
        std::memset(output(b, i, first_head), 0, static_cast<size_t>(group * value_width * item));
      }
    }
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kAttentionRows, remaining = query_count * group - first;
      if (remaining <= 0) return;
      const void* q_rows[kAttentionRows];
      void* out_rows[kAttentionRows];
      int64_t begins[kAttentionRows], ends[kAttentionRows];
      const int64_t count = remaining < kAttentionRows ? remaining : kAttentionRows;
      for (int64_t r = 0; r < count; ++r) {
        const Query one = query((first + r) / group);
        const int64_t head = first_head + (first + r) % group;
        q_rows[r] = at(q, b, head, one.position);
        out_rows[r] = output(b, one.position, head);
        begins[r] = one.begin;
        ends[r] = one.end;
      }
      kernel.run({count, q_rows, out_rows, begins, ends, nullptr, keys, keys + key_bytes, nullptr, nullptr, dtype_of(q.type),
                  cache_type_of(dtype_of(q.type)), width, value_width, factor, cap, scratch, nullptr, kernel.context});
    }
  };
  const auto scratch_of = [&](int worker) { return reinterpret_cast<float*>(scratches + worker * scratch_bytes); };
  if (by_heads) {
    parallel_1d(threads, all_heads, 1, [&](int worker, int64_t begin, int64_t end) {
      char* const keys = copied + worker * head_bytes;
      for (int64_t head = begin; head < end; ++head) {
        copy(head, 0, length, keys);
        run_tiles(head, 0, tiles, keys, scratch_of(worker));
      }
    });
    return {};
  }
  Band* const bands = new (memory.data()) Band[static_cast<size_t>(all_heads)];
  Grid grid{};
  grid.rows = all_heads * length;
  grid.band_rows = length;
  grid.prepare_rows = (1 + kClaimValues / width / kKeyPositions) * kKeyPositions;
  grid.columns = tiles;
  grid.least_columns = grid.most_columns = 1 + kClaimProducts / (length * (width + value_width) * kAttentionRows);
  parallel_2d(
      threads, grid, bands,
      [&](int, int64_t begin, int64_t end) {
        while (begin < end) {  // a single tile has a single thread
          const int64_t head = begin / length, next = (head + 1) * length;
          copy(head, begin % length, (next < end ? next : end) - head * length, copied + head * head_bytes);
          begin = next;
        }
      },
      [&](int worker, int64_t head, int64_t begin, int64_t end) {
        run_tiles(head, begin, end, copied + head * head_bytes, scratch_of(worker));
      });
  return {};
}

}  // namespace lowbit
