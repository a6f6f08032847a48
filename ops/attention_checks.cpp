#include "attention_checks.h"

#include <cmath>

#include "check.h"
#include "scores.h"

namespace lowbit {
namespace {

// A byte has two 4-bit codes, and a vector of the kernels has 16 bytes of codes.
constexpr int64_t kRotatedStep = 32;

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

Status check_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                       const TensorView& v_cache, const TensorView& start, const Scores& scores, const TensorView& out,
                       AttentionSizes* sizes) {
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

}  // namespace lowbit
