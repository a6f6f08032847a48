// Checks of attention's tensors and of its caches.
#pragma once

#include "../kernels/ukernel.h"
#include "operators.h"

namespace lowbit {

// The sizes of a call of attention over caches.
struct AttentionSizes {
  int64_t batch, heads, kv_heads, positions, width, value_width;
  int64_t max_length, start;
  CacheType cache;
};

// A head has the codes of all positions, then their float32 scales, so a position takes 4 more bytes.
inline constexpr int64_t kScaleBytes = 4;

constexpr int64_t scale_bytes(CacheType cache) { return has_scales(cache) ? kScaleBytes : 0; }

// For queries and values that attention_shape() has checked.
Status check_caches(const TensorView& q, const TensorView& v, const TensorView& k_cache, const TensorView& v_cache,
                    CacheType* type);

// Checks all arguments of attention() except for the limit of the instruction set and the threads.
Status check_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                       const TensorView& v_cache, const TensorView& start, const Scores& scores, const TensorView& out,
                       AttentionSizes* sizes);

}  // namespace lowbit
