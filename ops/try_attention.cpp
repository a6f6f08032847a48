#include <algorithm>
#include <cstddef>
#include <cstring>

#include "check.h"
#include "rows.h"
#include "trial.h"
#include "write_positions.h"

namespace lowbit {
namespace {

// Widths of a head's keys and values. Segments have 64 inputs: widths of less than one, one, one and a half, two, two and a
// half and more segments; some are whole rotation blocks, others are not. Cases that only add a width have few positions.
struct Case {
  int64_t width, value_width, positions, queries;
};
constexpr Case kCases[] = {{64, 32, 600, 3},    {16, 16, 33, 1},    {32, 32, 47, 2},    {48, 80, 37, 5},   {80, 48, 273, 4},
                           {96, 96, 51, 16},    {112, 160, 35, 7},  {128, 128, 541, 4}, {160, 96, 61, 3},  {192, 160, 45, 9},
                           {224, 256, 290, 1},  {256, 224, 49, 8},  {256, 256, 265, 2}, {320, 64, 39, 3},  {512, 512, 43, 4}};
constexpr CacheType kCaches[] = {CacheType::f32, CacheType::bf16, CacheType::f16,
                                 CacheType::i8,  CacheType::i4,   CacheType::i8_i4};
constexpr int64_t kMostPositions = 608, kSpans = 2;
// Written after the last visible position: special values of the contract.
constexpr int64_t kSpecial = 2;

const char* name_of(CacheType type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8", "int4", "int8 and int4"};
  return kNames[static_cast<int>(type)];
}

class AttentionTrial {
 public:
  Status run(const AttentionKernel& kernel) {
    for (const Case& c : kCases) {
      case_ = c;
      const bool is_first = &c == kCases;
      for (const CacheType cache : kCaches) {
        if (value_type(cache) == CacheType::i4 && (c.width % 32 != 0 || c.value_width % 32 != 0)) continue;
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
          if (cache <= CacheType::f16 && cache != CacheType::f32 && cache != cache_type_of(type)) continue;
          // All input types with the first widths, then one type per case in turn.
          if (!is_first && cache_type_of(type) != cache && static_cast<int>(type) != number_ % 3) continue;
          ++number_;
          cache_ = cache;
          type_ = type;
          if (Status s = write(kernel); !s.ok()) return s;
          for (const float cap : {0.0f, 2.0f}) {
            if (Status s = attend(kernel, cap); !s.ok()) return s;
          }
          if (Status s = attend_spans(kernel); !s.ok()) return s;
        }
      }
    }
    return {};
  }

 private:
  struct Cache {
    GuardedMemory keys{"keys"}, values{"values"}, key_scales{"scales of keys"}, value_scales{"scales of values"};
    char *k, *v;
    float *k_scales, *v_scales;

    Status take(const Case& c, CacheType type) {
      const int64_t held = kMostPositions;
      key_bytes = cache_bytes(key_type(type), held * c.width);
      value_bytes = cache_bytes(value_type(type), held * c.value_width);
      if (Status s = keys.take(key_bytes, &k); !s.ok()) return s;
      if (Status s = values.take(value_bytes, &v); !s.ok()) return s;
      if (Status s = key_scales.take(held, &k_scales); !s.ok()) return s;
      if (Status s = value_scales.take(held, &v_scales); !s.ok()) return s;
      std::memset(k, 0, static_cast<size_t>(key_bytes));
      std::memset(v, 0, static_cast<size_t>(value_bytes));
      std::memset(k_scales, 0, static_cast<size_t>(held) * sizeof(float));
      std::memset(v_scales, 0, static_cast<size_t>(held) * sizeof(float));
      return {};
    }
    uint64_t checksum() const {
      return ((keys.checksum() * 31 + values.checksum()) * 31 + key_scales.checksum()) * 31 + value_scales.checksum();
    }
    int64_t key_bytes, value_bytes;
  };

  Status says(const AttentionKernel& kernel, const char* what) const {
    return Status::error("kernel '%s' %s: keys of %" PRId64 " and values of %" PRId64 " values, %" PRId64 " positions of %s in "
                         "a cache of %s", kernel.name, what, case_.width, case_.value_width, case_.positions,
                         lowbit::name_of(type_), name_of(cache_));
  }

  void fill(void* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) store_from_f32(values, type_, i, random_.between(-1.5f, 1.5f));
  }

  // Writes all positions by the portable kernel one by one, and by `kernel`, from contiguous or strided values.
  Status write(const AttentionKernel& kernel) {
    if (Status s = expected_cache_.take(case_, cache_); !s.ok()) return s;
    if (Status s = actual_cache_.take(case_, cache_); !s.ok()) return s;
    const int64_t step = number_ % 3 == 0 ? 3 : 1, item = size_of(type_), count = case_.positions + kSpecial;
    const int64_t k_row = case_.width * step, v_row = case_.value_width * step;
    char *k, *v;
    if (Status s = k_.take(count * k_row * item, &k); !s.ok()) return s;
    if (Status s = v_.take(count * v_row * item, &v); !s.ok()) return s;
    fill(k, case_.positions * k_row);
    fill(v, case_.positions * v_row);
    std::memset(k + case_.positions * k_row * item, 0, static_cast<size_t>(kSpecial * k_row * item));
    std::memset(v + case_.positions * v_row * item, 0, static_cast<size_t>(kSpecial * v_row * item));
    store_from_f32(k, type_, (count - 1) * k_row + 5 * step, INFINITY);
    store_from_f32(v, type_, count * v_row - step, -INFINITY);
    const uint64_t before = k_.checksum() + v_.checksum();
    const auto write = [&](const AttentionKernel& by, const Cache& to, int64_t position, int64_t positions) {
      const bool scales = has_scales(cache_);
      AttentionWriteArgs args{k + position * k_row * item, v + position * v_row * item, step, step, to.k, to.v,
                              scales ? to.k_scales : nullptr, scales ? to.v_scales : nullptr, position, type_, cache_,
                              case_.width, case_.value_width};
      args.k_position_step = k_row;
      args.v_position_step = v_row;
      write_positions(by, args, positions);
    };
    for (int64_t position = 0; position < count; ++position) write(portable_attention(), expected_cache_, position, 1);
    // Several at a time, if the kernel can: whole panels, and pieces that begin or end within panels.
    for (int64_t position = 0, piece = 1; position < count; piece = piece % 40 + 13) {
      const int64_t some = std::min(piece, count - position);
      write(kernel, actual_cache_, position, some);
      position += some;
    }
    if (before != k_.checksum() + v_.checksum()) return says(kernel, "changes what it writes to the cache");
    const GuardedMemory* const memories[] = {&actual_cache_.keys, &actual_cache_.values, &actual_cache_.key_scales,
                                             &actual_cache_.value_scales};
    for (const GuardedMemory* memory : memories) {
      if (!memory->is_intact()) return says(kernel, "writes outside of the cache");
    }
    const auto compare = [&](const char* what, const void* right, const void* found, int64_t bytes) {
      for (int64_t i = 0; i < bytes; ++i) {
        const unsigned r = static_cast<const uint8_t*>(right)[i], f = static_cast<const uint8_t*>(found)[i];
        if (r == f) continue;
        return Status::error("kernel '%s' writes other bytes than the portable kernel: keys of %" PRId64 " and values of %"
                             PRId64 " values, %" PRId64 " positions of %s to a cache of %s: byte %" PRId64 " of the %s is "
                             "0x%02x; expected 0x%02x",
                             kernel.name, case_.width, case_.value_width, case_.positions, lowbit::name_of(type_),
                             name_of(cache_), i, what, f, r);
      }
      return Status();
    };
    const int64_t scale_bytes = kMostPositions * static_cast<int64_t>(sizeof(float));
    if (Status s = compare("keys", expected_cache_.k, actual_cache_.k, expected_cache_.key_bytes); !s.ok()) return s;
    if (Status s = compare("values", expected_cache_.v, actual_cache_.v, expected_cache_.value_bytes); !s.ok()) return s;
    if (Status s = compare("scales of keys", expected_cache_.k_scales, actual_cache_.k_scales, scale_bytes); !s.ok()) return s;
    return compare("scales of values", expected_cache_.v_scales, actual_cache_.v_scales, scale_bytes);
  }

  // Queries whose row r begins one value after the end of row r - 1, and outputs with the same gaps.
  Status take_rows() {
    const int64_t item = size_of(type_), rows = case_.queries;
    if (Status s = q_.take(rows * (case_.width + 1) * item, &queries_); !s.ok()) return s;
    if (Status s = expected_.take(rows * (case_.value_width + 1) * item, &expected_out_); !s.ok()) return s;
    if (Status s = actual_.take(rows * (case_.value_width + 1) * item, &actual_out_); !s.ok()) return s;
    if (Status s = scratch_.take(attention_scratch(case_.width, case_.value_width), &scratch_values_); !s.ok()) return s;
    if (Status s = partials_.take(kSpans * attention_partial(rows, case_.value_width), &partial_values_); !s.ok()) return s;
    fill(queries_, rows * (case_.width + 1));
    return {};
  }

  // Arguments of both kernels, with outputs `out`. Rows see all positions except some at the end, or windows, or few positions.
  AttentionArgs arguments(float cap, char* out) {
    const int64_t item = size_of(type_), rows = case_.queries, positions = case_.positions;
    for (int64_t r = 0; r < rows; ++r) {
      row_q_[r] = queries_ + r * (case_.width + 1) * item;
      row_out_[r] = out + r * (case_.value_width + 1) * item;
      ends_[r] = positions - rows + r + 1;
      begins_[r] = number_ % 3 == 0 ? r : number_ % 3 == 1 ? 0 : std::max<int64_t>(ends_[r] - 21, 0);
      sinks_[r] = 0.5f * static_cast<float>(r);
    }
    std::memset(out, 0xff, static_cast<size_t>(rows * (case_.value_width + 1) * item));
    std::memset(scratch_values_, 0xff,
                static_cast<size_t>(attention_scratch(case_.width, case_.value_width)) * sizeof(float));
    const Cache& from = expected_cache_;
    const bool scales = has_scales(cache_);
    return {rows, row_q_, row_out_, begins_, ends_, number_ % 2 == 0 ? sinks_ : nullptr, from.k, from.v,
            scales ? from.k_scales : nullptr, scales ? from.v_scales : nullptr, type_, cache_, case_.width, case_.value_width,
            0.2f, cap, scratch_values_};
  }

  Status attend(const AttentionKernel& kernel, float cap) {
    if (Status s = take_rows(); !s.ok()) return s;
    portable_attention().run(arguments(cap, expected_out_));
    AttentionArgs args = arguments(cap, actual_out_);
    args.context = kernel.context;
    const uint64_t inputs = q_.checksum() + expected_cache_.checksum();
    kernel.run(args);
    return compare(kernel, "", cap, inputs);
  }

  // All rows see the same positions, of one or two spans.
  Status attend_spans(const AttentionKernel& kernel) {
    if (Status s = take_rows(); !s.ok()) return s;
    const int64_t rows = case_.queries, partial = attention_partial(rows, case_.value_width);
    const int64_t spans = case_.positions > kAttentionSpan ? kSpans : 1;
    const auto by_spans = [&](const AttentionKernel& by, char* out) {
      std::memset(partial_values_, 0xff, static_cast<size_t>(kSpans * partial) * sizeof(float));
      for (int64_t span = 0; span < spans; ++span) {
        AttentionArgs args = arguments(0.0f, out);
        std::fill_n(begins_, rows, span == 0 && number_ % 2 == 0 ? 7 : span * kAttentionSpan);
        std::fill_n(ends_, rows, span + 1 < spans ? kAttentionSpan : case_.positions);
        if (span > 0) args.sinks = nullptr;
        args.partial = partial_values_ + span * partial;
        args.context = by.context;
        by.run(args);
      }
      by.join({rows, spans, partial_values_, row_out_, type_, cache_, case_.value_width, by.context});
    };
    by_spans(portable_attention(), expected_out_);
    const uint64_t inputs = q_.checksum() + expected_cache_.checksum();
    by_spans(kernel, actual_out_);
    return compare(kernel, " in spans", 0.0f, inputs);
  }

  // Outputs are followed by a value that must not be written.
  Status compare(const AttentionKernel& kernel, const char* how, float cap, uint64_t inputs) const {
    for (const GuardedMemory* memory : {&actual_, &scratch_, &partials_}) {
      if (!memory->is_intact()) return says(kernel, "writes outside of its outputs or its scratch");
    }
    if (q_.checksum() + expected_cache_.checksum() != inputs) return says(kernel, "changes its inputs");
    for (int64_t r = 0; r < case_.queries; ++r) {
      for (int64_t i = 0; i <= case_.value_width; ++i) {
        const int64_t at = r * (case_.value_width + 1) + i;
        const float found = load_as_f32(actual_out_, type_, at), right = load_as_f32(expected_out_, type_, at);
        if (same(found, right)) continue;
        return Status::error("kernel '%s' differs from the portable kernel: keys of %" PRId64 " and values of %"
                             PRId64 " values, %" PRId64 " positions of %s in a cache of %s, softcap %g%s: [%" PRId64 ", %"
                             PRId64 "] is %.9g; expected %.9g",
                             kernel.name, case_.width, case_.value_width, case_.positions, lowbit::name_of(type_),
                             name_of(cache_), static_cast<double>(cap), how, r, i, static_cast<double>(found),
                             static_cast<double>(right));
      }
    }
    return {};
  }

  Case case_{};
  CacheType cache_{};
  DType type_{};
  int number_ = -1;
  Cache expected_cache_, actual_cache_;
  GuardedMemory k_{"keys"}, v_{"values"}, q_{"queries"}, expected_{"outputs"}, actual_{"outputs"}, scratch_{"scratch"},
      partials_{"partial outputs"};
  char *queries_, *expected_out_, *actual_out_;
  float *scratch_values_, *partial_values_;
  Random random_;
  const void* row_q_[kAttentionRows];
  void* row_out_[kAttentionRows];
  int64_t begins_[kAttentionRows], ends_[kAttentionRows];
  float sinks_[kAttentionRows];
};

}  // namespace

Status try_attention(const LoadedLibrary& library) {
  AttentionTrial trial;
  for (const AttentionKernel& kernel : library.attention) {
    if (!can_run(kernel.isa)) continue;
    if (Status status = trial.run(kernel); !status.ok()) return status;
  }
  return {};
}

}  // namespace lowbit
