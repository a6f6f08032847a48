#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "aligned_memory.h"
#include "check.h"
#include "rows.h"
#include "trial.h"

namespace lowbit {
namespace {

// Keys and values of one head, over two spans, as the portable row and as another one writes them.
constexpr int64_t kPositions = 600, kHeld = 608, kWidth = 64, kValueWidth = 32, kQueries = 3, kSpans = 2;

struct AttentionMemory {
  alignas(kAlignment) float scratch[lowbit_attention_scratch(kWidth, kValueWidth)];
  alignas(kAlignment) float partials[kSpans * lowbit_attention_partial(kAttentionRows, kValueWidth)];
  struct Cache {
    float keys[kHeld * kWidth], values[kHeld * kValueWidth], key_scales[kHeld], value_scales[kHeld];
  } expected_cache, actual_cache;
  float q[kQueries][kWidth], k[kWidth], v[kValueWidth];
  float expected[kQueries][kValueWidth], actual[kQueries][kValueWidth];
};

class AttentionTrial {
 public:
  explicit AttentionTrial(AttentionMemory& memory) : memory_(memory) {}

  Status run(const AttentionKernel& row) {
    for (const CacheType cache : {CacheType::f32, CacheType::bf16, CacheType::f16, CacheType::i8, CacheType::i4,
                                  CacheType::i8_i4}) {
      for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        if (cache <= CacheType::f16 && cache != CacheType::f32 && cache != cache_type_of(type)) continue;
        if (Status s = write(row, cache, type); !s.ok()) return s;
        for (const float cap : {0.0f, 2.0f}) {
          if (Status s = attend(row, cache, type, cap); !s.ok()) return s;
        }
        if (Status s = attend_spans(row, cache, type); !s.ok()) return s;
      }
    }
    return {};
  }

 private:
  void fill(void* values, DType type, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store_from_f32(values, type, i, random_.between(-1.5f, 1.5f));
  }

  // Writes all positions, by the portable row and by `row`.
  Status write(const AttentionKernel& row, CacheType cache, DType type) {
    std::memset(&memory_.expected_cache, 0, sizeof memory_.expected_cache);
    std::memset(&memory_.actual_cache, 0, sizeof memory_.actual_cache);
    for (int64_t position = 0; position < kPositions; ++position) {
      fill(memory_.k, type, kWidth);
      fill(memory_.v, type, kValueWidth);
      const auto to = [&](AttentionMemory::Cache& to, const void* context) {
        const bool scales = has_scales(cache);
        return AttentionWriteArgs{memory_.k, memory_.v, 1, 1, to.keys, to.values, scales ? to.key_scales : nullptr,
                                  scales ? to.value_scales : nullptr, position, type, cache, kWidth, kValueWidth, context};
      };
      portable_attention().write(to(memory_.expected_cache, nullptr));
      row.write(to(memory_.actual_cache, row.context));
    }
    const auto* const actual = reinterpret_cast<const unsigned char*>(&memory_.actual_cache);
    const auto* const expected = reinterpret_cast<const unsigned char*>(&memory_.expected_cache);
    for (size_t i = 0; i < sizeof memory_.actual_cache; ++i) {
      if (actual[i] == expected[i]) continue;
      const bool is_key = i < offsetof(AttentionMemory::Cache, values);
      return Status::error("row '%s' writes something else than the portable kernel: %" PRId64 " positions of %s to a cache of "
                           "type %d: byte %zu of the %s is 0x%02x; expected 0x%02x",
                           row.name, kPositions, name_of(type), static_cast<int>(cache),
                           is_key ? i : i - offsetof(AttentionMemory::Cache, values), is_key ? "keys" : "values and scales",
                           actual[i], expected[i]);
    }
    return {};
  }

  // What both rows are told, of outputs `out`.
  AttentionArgs arguments(CacheType cache, DType type, float cap, float (&out)[kQueries][kValueWidth]) {
    for (int64_t r = 0; r < kQueries; ++r) {
      q_[r] = memory_.q[r];
      out_[r] = out[r];
      begins_[r] = r;
      ends_[r] = kPositions - kQueries + r + 1;
      sinks_[r] = 0.5f * static_cast<float>(r);
    }
    std::memset(out, 0xff, sizeof out);
    AttentionMemory::Cache& from = memory_.expected_cache;
    const bool scales = has_scales(cache);
    return {kQueries, q_, out_, begins_, ends_, sinks_, from.keys, from.values, scales ? from.key_scales : nullptr,
            scales ? from.value_scales : nullptr, type, cache, kWidth, kValueWidth, 0.2f, cap, memory_.scratch};
  }

  Status attend(const AttentionKernel& row, CacheType cache, DType type, float cap) {
    for (auto& q : memory_.q) fill(q, type, kWidth);
    portable_attention().run(arguments(cache, type, cap, memory_.expected));
    AttentionArgs args = arguments(cache, type, cap, memory_.actual);
    args.context = row.context;
    row.run(args);
    return compare(row, cache, type, "");
  }

  Status attend_spans(const AttentionKernel& row, CacheType cache, DType type) {
    for (auto& q : memory_.q) fill(q, type, kWidth);
    const auto by_spans = [&](const AttentionKernel& kernel, float (&out)[kQueries][kValueWidth]) {
      for (int64_t span = 0; span < kSpans; ++span) {
        AttentionArgs args = arguments(cache, type, 0.0f, out);
        for (int64_t r = 0; r < kQueries; ++r) {
          begins_[r] = span * kAttentionSpan;
          ends_[r] = span == 0 ? kAttentionSpan : kPositions;
        }
        if (span > 0) args.sinks = nullptr;
        args.partial = memory_.partials + span * attention_partial(kQueries, kValueWidth);
        args.context = kernel.context;
        kernel.run(args);
      }
      kernel.join({kQueries, kSpans, memory_.partials, out_, type, cache, kValueWidth, kernel.context});
    };
    by_spans(portable_attention(), memory_.expected);
    by_spans(row, memory_.actual);
    return compare(row, cache, type, " in spans");
  }

  Status compare(const AttentionKernel& row, CacheType cache, DType type, const char* how) const {
    for (int64_t r = 0; r < kQueries; ++r) {
      for (int64_t i = 0; i < kValueWidth; ++i) {
        const float actual = load_as_f32(memory_.actual[r], type, i), expected = load_as_f32(memory_.expected[r], type, i);
        if (same(actual, expected)) continue;
        return Status::error("row '%s' computes something else than the portable kernel: %" PRId64 " positions of %s in a "
                             "cache of type %d%s: [%" PRId64 ", %" PRId64 "] is %.9g; expected %.9g",
                             row.name, kPositions, name_of(type), static_cast<int>(cache), how, r, i,
                             static_cast<double>(actual), static_cast<double>(expected));
      }
    }
    return {};
  }

  AttentionMemory& memory_;
  Random random_;
  const void* q_[kQueries];
  void* out_[kQueries];
  int64_t begins_[kQueries], ends_[kQueries];
  float sinks_[kQueries];
};

}  // namespace

Status try_attention(const LoadedLibrary& library) {
  if (library.attention.count == 0) return {};
  const std::unique_ptr<char, FreeAligned> memory(static_cast<char*>(allocate_aligned(sizeof(AttentionMemory))));
  if (memory == nullptr) return Status::no_memory("no memory for %zu bytes of a trial", sizeof(AttentionMemory));
  AttentionTrial trial(*new (memory.get()) AttentionMemory);
  for (const AttentionKernel& row : library.attention) {
    if (!can_run(row.isa)) continue;
    if (Status status = trial.run(row); !status.ok()) return status;
  }
  return {};
}

}  // namespace lowbit
