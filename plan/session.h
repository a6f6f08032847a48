// The content of a text, for the files that compute and store it.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "../ops/tensor_view.h"
#include "model.h"

namespace lowbit {

inline constexpr int64_t kPanel = 16;  // positions whose keys are interleaved; the length of caches is a multiple of it
inline constexpr int64_t kScaleBytes = 4;

struct PlanSession::Implementation {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  // Bytes of a cache that belong to the tokens so far: `parts` pieces of `bytes`, each at a multiple of `step`.
  struct Content {
    char* data;
    int64_t parts, bytes, step;
  };

  const void* model = nullptr;
  uint64_t digest = 0;  // identifies the model's plan
  int64_t length = 0, vocabulary = 0;
  TextCache keys = TextCache::f32, values = TextCache::f32;
  bool recurrent = false;
  std::vector<int64_t> tokens;
  std::vector<TensorView> caches;
  std::vector<bool> states;  // for each cache: whether it is a state; others have a row for each token
  std::vector<std::unique_ptr<void, Free>> memory;

  int64_t position() const { return static_cast<int64_t>(tokens.size()); }

  // The bytes of all caches with memory, after `count` tokens. For each head these are whole panels of keys and values; the
  // scales of codes come after the codes of all positions.
  std::vector<Content> contents(int64_t count) const {
    const int64_t rows = (count + kPanel - 1) / kPanel * kPanel;
    std::vector<Content> result;
    for (size_t i = 0; i < caches.size(); ++i) {
      const TensorView& cache = caches[i];
      const int64_t all = cache.shape.numel() * element_bytes(cache.type);
      if (cache.data == nullptr || all == 0) continue;
      char* const data = static_cast<char*>(cache.data);
      if (states[i]) {
        result.push_back({data, 1, all, all});
        continue;
      }
      const int64_t heads = cache.shape.size[1], length = cache.shape.size[2], step = all / heads;
      const int64_t scale = cache.type == ElementType::i8 ? kScaleBytes : 0, row = step / length - scale;
      result.push_back({data, heads, rows * row, step});
      if (scale > 0) result.push_back({data + length * row, heads, rows * scale, step});
    }
    return result;
  }
};

}  // namespace lowbit
