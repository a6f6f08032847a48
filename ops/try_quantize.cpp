#include <cstring>

#include "../kernels/format.h"
#include "trial.h"

namespace lowbit {
namespace {

class QuantizeTrial {
 public:
  Status run(const QuantizeKernel& kernel) {
    int number = 0;
    for (const int64_t k : {128, 100, 130, 70, 300, 1, 16, 17, 63, 65, 520, 1100, 4112}) {
      for (const int64_t group_size : {32, 64, 0, 16, 48, 128}) {
        Layout layout;
        const Mapping with_mins = mapping_with(true, false);  // so that group sums are computed
        if (Status s = make_layout(1, k, 4, group_size, with_mins, false, &layout); !s.ok()) return s;
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
          if (Status s = run_case(kernel, layout, type, number++); !s.ok()) return s;
        }
      }
    }
    return {};
  }

 private:
  struct Outputs {
    int8_t* a;
    float* scales;
    int32_t* sums;
    float* group_sums;
  };
  struct Memories {
    GuardedMemory a{"activations"}, scales{"activations"}, sums{"activations"}, group_sums{"activations"};
  };

  // The values include special cases of the contract, and the inputs start at an unaligned address.
  Status run_case(const QuantizeKernel& kernel, const Layout& layout, DType type, int number) {
    const int64_t padded = layout.blocks * kBlockInputs;
    constexpr float special[] = {1.0f, 0.0f, INFINITY, NAN, 1e-39f, 3e38f, 65504.0f, -1e-8f};
    Outputs expected, actual;
    char* x;
    if (Status s = x_.take((layout.k + 1) * size_of(type), &x); !s.ok()) return s;
    std::memset(x, 0, static_cast<size_t>(size_of(type)));
    x += size_of(type);
    for (int64_t i = 0; i < layout.k; ++i) {
      const bool all = number % 8 == 1;  // whether all values are zero
      const float value = all ? 0.0f : random_.between(-2.0f, 2.0f) * (number % 5 == 4 ? 1e-20f : 1.0f);
      store_from_f32(x, type, i, i % 257 == 17 ? special[(number + i) % 8] : value);
    }
    const auto take = [&](Memories& memories, Outputs* out) {
      if (Status s = memories.a.take(padded, &out->a); !s.ok()) return s;
      if (Status s = memories.scales.take(layout.segments, &out->scales); !s.ok()) return s;
      if (Status s = memories.sums.take(layout.segments, &out->sums); !s.ok()) return s;
      if (Status s = memories.group_sums.take(layout.groups, &out->group_sums); !s.ok()) return s;
      std::memset(out->a, 0x80, static_cast<size_t>(padded));
      std::memset(out->scales, 0xff, sizeof(float) * static_cast<size_t>(layout.segments));
      std::memset(out->sums, 0x80, sizeof(int32_t) * static_cast<size_t>(layout.segments));
      std::memset(out->group_sums, 0xff, sizeof(float) * static_cast<size_t>(layout.groups));
      return Status();
    };
    if (Status s = take(expected_, &expected); !s.ok()) return s;
    if (Status s = take(actual_, &actual); !s.ok()) return s;
    const bool wants_group_sums = number % 4 != 3;
    const auto run = [&](const QuantizeKernel& by, const Outputs& to) {
      by.run({x, type, layout.k, padded, layout.group_inputs(), to.a, to.scales, to.sums,
              wants_group_sums ? to.group_sums : nullptr, by.context});
    };
    const uint64_t inputs = x_.checksum();
    run(portable_quantize(), expected);
    run(kernel, actual);
    const auto says = [&](const char* what) {
      return Status::error("kernel '%s' %s: %" PRId64 " %s values, group size %" PRId64, kernel.name, what, layout.k,
                           name_of(type), layout.group_size);
    };
    if (x_.checksum() != inputs) return says("changes its inputs");
    for (const GuardedMemory* memory : {&actual_.a, &actual_.scales, &actual_.sums, &actual_.group_sums}) {
      if (!memory->is_intact()) return says("writes outside of its outputs");
    }
    const auto compare = [&](const char* what, const auto* right, const auto* found, int64_t count, bool as_bits) {
      for (int64_t i = 0; i < count; ++i) {
        const float r = static_cast<float>(right[i]), f = static_cast<float>(found[i]);
        if (as_bits ? bits_of_float(r) == bits_of_float(f) : same(r, f)) continue;
        return Status::error("kernel '%s' differs from the portable kernel: %" PRId64 " %s values, group size %"
                             PRId64 ": %s[%" PRId64 "] is %.9g; expected %.9g",
                             kernel.name, layout.k, name_of(type), layout.group_size, what, i, static_cast<double>(f),
                             static_cast<double>(r));
      }
      return Status();
    };
    if (Status s = compare("a", expected.a, actual.a, padded, true); !s.ok()) return s;
    if (Status s = compare("scales", expected.scales, actual.scales, layout.segments, true); !s.ok()) return s;
    if (Status s = compare("sums", expected.sums, actual.sums, layout.segments, true); !s.ok()) return s;
    return compare("group_sums", expected.group_sums, actual.group_sums, layout.groups, false);
  }

  GuardedMemory x_{"inputs"};
  Memories expected_, actual_;
  Random random_;
};

}  // namespace

Status try_quantize(const LoadedLibrary& library) {
  QuantizeTrial trial;
  for (const QuantizeKernel& kernel : library.quantize) {
    if (!can_run(kernel.isa)) continue;
    if (Status status = trial.run(kernel); !status.ok()) return status;
  }
  return {};
}

}  // namespace lowbit
