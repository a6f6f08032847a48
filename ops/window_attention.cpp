// Attention over caches that hold a window. When a call does not fit, the window moves to the front of the caches.
#include <cstring>

#include "attention_checks.h"
#include "check.h"

namespace lowbit {
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
  AttentionSizes sizes;
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
    const TensorView one_k = part_of(k, -1, 2, 0, one.shape.size[2]), one_v = part_of(v, -1, 2, 0, one.shape.size[2]);
    if (Status status = check_attention(one, one_k, one_v, k_cache, v_cache, relative, scores, first_out, &sizes);
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
