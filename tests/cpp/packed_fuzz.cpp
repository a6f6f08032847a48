// Runs every operator and every kernel of this CPU on packed matrices with randomly damaged headers and payloads. Each matrix
// is refused, or computed with the same bits everywhere. AddressSanitizer detects out-of-bounds accesses (`make fuzz`), because
// buffers have exact sizes. support/packed_damage.h makes the damage.
//
//   packed_fuzz [EXECUTIONS [SEED [FIRST]]]   the executions FIRST, FIRST + 1, ... of a seed; a failure prints its number
//   packed_fuzz --inputs FILE                 the inputs of a file from the guided search below
//   packed_fuzz --join FILE INPUT...          makes that file
//
// Compiled with LOWBIT_GUIDED it is a libFuzzer target (`make fuzz-guided`): inputs that reach new code are kept and damaged
// further. An input is 8 bytes, the seed of the calls' arguments, and a packed matrix.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "../../kernels/isa.h"
#include "../../kernels/registry.h"
#include "support/packed_damage.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr int64_t kSameMatrix = 16;  // executions per undamaged matrix
constexpr int64_t kSmallMatrices = 16;  // one in this many is larger and has tiles of many rows; it takes as long as all others

struct Counts {
  int64_t refused = 0, altered = 0, kernels = 0;
};

// Memory of the exact size of its content.
struct Buffer {
  std::unique_ptr<uint8_t[]> memory;
  int64_t bytes, gap;

  explicit Buffer(int64_t size, int64_t misaligned = 0)
      : memory(new uint8_t[static_cast<size_t>(size + misaligned)]), bytes(size), gap(misaligned) {
    std::memset(memory.get(), 0x5c, static_cast<size_t>(size + misaligned));
    forget(memory.get(), size + misaligned);
  }
  uint8_t* data() const { return memory.get() + gap; }
  TensorView view(ElementType type, const std::vector<int64_t>& sizes) const {
    return view_of(data(), type, sizes, contiguous_strides(sizes));
  }
};

Buffer buffer_of(ElementType type, const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return Buffer(count * element_bytes(type));
}

char current[96];

[[noreturn]] void found(const std::string& what, const Layout* layout) {
  std::fprintf(stderr, "%s: %s\n", current, what.c_str());
  if (layout != nullptr) {
    std::fprintf(stderr, "  %d bits, mapping %s, n %lld, k %lld, group size %lld\n", layout->bits,
                 name_of(layout->mapping), static_cast<long long>(layout->n), static_cast<long long>(layout->k),
                 static_cast<long long>(layout->group_size));
  }
  std::exit(1);
}

void expect(bool right, const char* what, const Layout* layout) {
  if (!right) found(what, layout);
}

void expect(bool right, const char* what, const Layout& layout, const Status& status) {
  if (right) return;
  found(std::string(what) + (status.ok() ? " accepts it" : std::string(" refuses it: ") + status.message()), &layout);
}

// Bits must be equal, except for NaN, whose sign and payload depend on the order of an instruction's operands.
void expect_same(const Buffer& values, const uint8_t* expected, DType dtype, const char* name, const Layout& layout) {
  expect_written(values.data(), values.bytes);
  if (std::memcmp(values.data(), expected, static_cast<size_t>(values.bytes)) == 0) return;
  for (int64_t i = 0; i < values.bytes / size_of(dtype); ++i) {
    const int64_t at = i * size_of(dtype);
    if (std::memcmp(values.data() + at, expected + at, static_cast<size_t>(size_of(dtype))) == 0) continue;
    const float value = load_as_f32(values.data(), dtype, i), wanted = load_as_f32(expected, dtype, i);
    if (std::isnan(value) && std::isnan(wanted)) continue;
    found(std::string(name) + ": element " + std::to_string(i) + " is " + std::to_string(value) + "; expected " +
              std::to_string(wanted),
          &layout);
  }
}

ElementType any_type(Random& random) {
  constexpr ElementType kTypes[] = {ElementType::f32, ElementType::bf16, ElementType::f16};
  return any_of(kTypes, random);
}

Buffer activations(ElementType type, int64_t count, Random& random) {
  Buffer buffer(count * element_bytes(type));
  const bool odd = random.below(8) == 0;  // infinities and the like
  for (int64_t i = 0; i < count; ++i) {
    const float value = odd && random.below(16) == 0 ? float_from_bits(any_of(kFloats, random)) : random.normal();
    store_from_f32(buffer.data(), dtype_of(type), i, value);
  }
  return buffer;
}

// Whether this CPU can run a kernel of a table, and the kernel supports such a matrix.
template <class Kernel>
bool fits(const Kernel& row, const Layout& layout) {
  return row.format == Format::panel16 && row.bits == layout.bits && (row.mappings & bit_of(layout.mapping)) != 0 &&
         (row.isa & ~cpu_isa()) == 0;
}

// `expected`: the portable kernel's result for each row of x alone. Every kernel of the table must match it, including the
// portable one with all rows of x at once.
void run_linear_rows(const uint8_t* packed, const Layout& layout, const TensorView& x, DType dtype, int64_t m,
                     const std::vector<uint8_t>& expected, Counts* counts) {
  const int64_t width = layout.blocks * kBlockInputs;
  const bool affine = layout.mapping == Mapping::affine;
  const Buffer a(m * width), scales(m * layout.segments * 4), sums(m * layout.segments * 4);
  const Buffer group_sums(affine ? m * layout.groups * 4 : 4);
  for (int64_t row = 0; row < m; ++row) {
    choose_quantize(kPortable)
        .run({.x = static_cast<const uint8_t*>(x.data) + row * layout.k * size_of(dtype),
              .x_dtype = dtype,
              .k = layout.k,
              .k_padded = width,
              .group_inputs = layout.group_inputs(),
              .a = reinterpret_cast<int8_t*>(a.data()) + row * width,
              .scales = reinterpret_cast<float*>(scales.data()) + row * layout.segments,
              .sums = reinterpret_cast<int32_t*>(sums.data()) + row * layout.segments,
              .group_sums = affine ? reinterpret_cast<float*>(group_sums.data()) + row * layout.groups : nullptr});
  }
  alignas(64) static uint8_t scratch[kLinearScratchBytes];
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& kernel = linear_kernel(i);
    if (!fits(kernel, layout)) continue;
    const Buffer out(m * layout.n * size_of(dtype));
    forget(scratch, sizeof scratch);
    kernel.run({.panels = packed + layout.header_bytes,
                .layout = layout,
                .panel_begin = 0,
                .panel_end = layout.panels,
                .a = reinterpret_cast<const int8_t*>(a.data()),
                .scales = reinterpret_cast<const float*>(scales.data()),
                .sums = reinterpret_cast<const int32_t*>(sums.data()),
                .group_sums = affine ? reinterpret_cast<const float*>(group_sums.data()) : nullptr,
                .m = m,
                .out = out.data(),
                .out_dtype = dtype,
                .out_stride = layout.n,
                .scratch = scratch});
    expect_same(out, expected.data(), dtype, kernel.name, layout);
    ++counts->kernels;
  }
}

void run_embedding_rows(const uint8_t* packed, const Layout& layout, DType dtype, int64_t row, Counts* counts) {
  const auto run = [&](const EmbeddingKernel& kernel) {
    Buffer out(layout.k * size_of(dtype));
    kernel.run({packed + layout.header_bytes, layout, row, out.data(), dtype});
    return out;
  };
  const Buffer expected = run(choose_embedding(layout, kPortable));
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& kernel = embedding_kernel(i);
    if (!fits(kernel, layout)) continue;
    expect_same(run(kernel), expected.data(), dtype, kernel.name, layout);
    ++counts->kernels;
  }
}

// Header data for a matrix without a valid header: arbitrary.
Layout any_layout(Random& random) {
  Layout layout{};
  layout.n = any_in(random, 1, 40);
  layout.k = any_in(random, 1, 80);
  layout.groups = 1;
  return layout;
}

// Whether repacking may fail like this: a matrix with a matching checksum can have scales that packing refuses.
bool as_sealed(const Status& status, bool sealed) {
  return status.ok() == sealed || (sealed && std::strstr(status.message(), "expected a finite value") != nullptr);
}

// Runs every operator that reads a packed matrix. `whole`: its header is valid, and `expected` is its product with x; `sealed`:
// the payload's checksum matches too.
void run_operators(const Buffer& bytes, const Layout& layout, bool whole, bool sealed, const TensorView& x, int64_t m,
                   const std::vector<uint8_t>& expected, Random& random) {
  const TensorView packed = bytes.view(ElementType::u8, {bytes.bytes});
  const DType dtype = dtype_of(x.type);
  const Buffer out(m * layout.n * element_bytes(x.type));
  const Status product = linear(x, packed, layout.n, out.view(x.type, {m, layout.n}), {});
  expect(product.ok() == whole, "linear", layout, product);
  if (whole) expect_same(out, expected.data(), dtype, "linear", layout);

  const Buffer both(2 * bytes.bytes), chosen(m * 8), of_experts(out.bytes);
  std::memcpy(both.data(), bytes.data(), static_cast<size_t>(bytes.bytes));
  std::memcpy(both.data() + bytes.bytes, bytes.data(), static_cast<size_t>(bytes.bytes));
  bool exist = true;
  for (int64_t row = 0; row < m; ++row) {
    const int64_t expert = random.below(16) == 0 ? any_in(random, -2, 3) : random.below(2);
    std::memcpy(chosen.data() + 8 * row, &expert, sizeof expert);
    exist = exist && expert >= 0 && expert < 2;
  }
  const Status experts =
      linear_experts(x, both.view(ElementType::u8, {2, bytes.bytes}), chosen.view(ElementType::i64, {m, 1}), layout.n,
                     of_experts.view(x.type, {m, 1, layout.n}), {});
  expect(experts.ok() == (whole && exist), "linear_experts", layout, experts);
  if (experts.ok()) expect_same(of_experts, expected.data(), dtype, "linear_experts", layout);

  const Buffer indices(3 * 8), rows(3 * layout.k * element_bytes(x.type));
  exist = true;
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t row = random.below(16) == 0 ? static_cast<int64_t>(any_of(kNumbers, random)) : random.below(layout.n);
    std::memcpy(indices.data() + 8 * i, &row, sizeof row);
    exist = exist && row >= 0 && row < layout.n;
  }
  const Status read =
      embedding(indices.view(ElementType::i64, {3}), packed, layout.k, rows.view(x.type, {3, layout.k}), {});
  expect(read.ok() == (whole && exist), "embedding", layout, read);

  const bool affine = whole && layout.mapping == Mapping::affine;
  const std::vector<int64_t> scales_shape = {layout.n, layout.groups}, none = {0, 0};
  const Buffer codes(layout.n * layout.k), scales = buffer_of(ElementType::f32, scales_shape);
  const Buffer mins = buffer_of(ElementType::f32, affine ? scales_shape : none);
  const std::vector<int64_t> bias_shape = {whole && layout.has_bias ? layout.n : 0};
  const Buffer bias = buffer_of(ElementType::f32, bias_shape);
  const Status unpacked =
      unpack(packed, codes.view(ElementType::u8, {layout.n, layout.k}), scales.view(ElementType::f32, scales_shape),
             mins.view(ElementType::f32, affine ? scales_shape : none), bias.view(ElementType::f32, bias_shape), {});
  expect(unpacked.ok() == sealed, "unpack", layout, unpacked);

  const int dim = static_cast<int>(random.below(2));
  const int64_t size = dim == 0 ? layout.n : layout.k;
  const int64_t step = dim == 1 && layout.group_size != 0 ? layout.group_size : 1;
  const int64_t begin = random.below(size) / step * step;
  const int64_t end = random.below(4) == 0 ? any_in(random, begin, size + 2) : size;
  Layout part;
  if (splice_shape(&packed, 1, dim, begin, end, &part).ok()) {
    expect(whole, "splice_shape", &layout);
    const Buffer cut(part.total_bytes);
    const Status spliced = splice(&packed, 1, dim, begin, end, cut.view(ElementType::u8, {part.total_bytes}), {});
    expect(as_sealed(spliced, sealed), "splice", layout, spliced);
    if (spliced.ok()) {
      Layout again;
      expect(read_header(cut.data(), cut.bytes, &again).ok(), "the header of what splice wrote", &layout);
      expect(verify_payload(cut.data(), again).ok(), "the checksum of what splice wrote", &layout);
    }
  }
  if (repack_shape(packed, "panel16", &part).ok()) {
    expect(whole, "repack_shape", &layout);
    const Buffer same(part.total_bytes);
    const Status repacked = repack(packed, "panel16", same.view(ElementType::u8, {part.total_bytes}), {});
    expect(as_sealed(repacked, sealed), "repack", layout, repacked);
  }
}

void execute(const std::vector<uint8_t>& content, bool small, Random& random, Counts* counts) {
  const Buffer bytes(static_cast<int64_t>(content.size()), random.below(8));
  if (!content.empty()) std::memcpy(bytes.data(), content.data(), content.size());
  Layout layout;
  const bool whole = read_header(bytes.data(), bytes.bytes, &layout).ok();
  if (!whole) layout = any_layout(random);
  const bool sealed = whole && verify_payload(bytes.data(), layout).ok();
  const int64_t m = small ? any_in(random, 1, 3) : random.below(8) == 0 ? any_in(random, 5, 40) : any_in(random, 1, 5);
  const ElementType type = any_type(random);
  const Buffer x = activations(type, m * layout.k, random);
  const TensorView rows = x.view(type, {m, layout.k});
  std::vector<uint8_t> expected;
  if (whole) expected = expected_linear(rows, bytes.data(), layout);
  run_operators(bytes, layout, whole, sealed, rows, m, expected, random);
  if (whole) {
    run_linear_rows(bytes.data(), layout, rows, dtype_of(type), m, expected, counts);
    run_embedding_rows(bytes.data(), layout, dtype_of(type), random.below(layout.n), counts);
  }
  counts->refused += !whole;
  counts->altered += whole && !sealed;
}

constexpr size_t kSeedBytes = 8;

void execute_input(const uint8_t* data, size_t size, Counts* counts) {
  uint64_t seed = 0;
  std::memcpy(&seed, data, std::min(size, kSeedBytes));
  Random random(seed);
  execute(size > kSeedBytes ? std::vector<uint8_t>(data + kSeedBytes, data + size) : std::vector<uint8_t>(),
          random.below(2) == 0, random, counts);
}

std::vector<uint8_t> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "%s cannot be read\n", path);
    std::exit(2);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// Each input is preceded by its length, in 4 bytes.
int join(const char* path, int count, char** inputs) {
  std::ofstream file(path, std::ios::binary);
  for (int i = 0; i < count; ++i) {
    const std::vector<uint8_t> input = read_file(inputs[i]);
    const uint32_t size = static_cast<uint32_t>(input.size());
    file.write(reinterpret_cast<const char*>(&size), sizeof size);
    file.write(reinterpret_cast<const char*>(input.data()), size);
  }
  return file.flush() ? 0 : 2;
}

int run_inputs(const char* path) {
  const std::vector<uint8_t> file = read_file(path);
  Counts counts;
  int64_t inputs = 0;
  for (size_t at = 0; at < file.size(); ++inputs) {
    uint32_t size = 0;
    const bool has_size = file.size() - at >= sizeof size;
    if (has_size) std::memcpy(&size, file.data() + at, sizeof size);
    if (!has_size || size > file.size() - at - sizeof size) {
      std::fprintf(stderr, "%s ends within input %lld\n", path, static_cast<long long>(inputs));
      return 2;
    }
    at += sizeof size;
    std::snprintf(current, sizeof current, "input %lld of the file", static_cast<long long>(inputs));
    set_current_case(current);
    execute_input(file.data() + at, size, &counts);
    at += size;
  }
  std::printf("%lld inputs: %lld headers refused, %lld payloads that are not as sealed, %lld runs of kernels, "
              "all as the portable ones\n",
              static_cast<long long>(inputs), static_cast<long long>(counts.refused),
              static_cast<long long>(counts.altered), static_cast<long long>(counts.kernels));
  return counts.refused > 0 && counts.altered > 0 && counts.kernels > 0 ? 0 : 1;
}

[[maybe_unused]] int64_t number(int argc, char** argv, int index, int64_t otherwise) {
  return argc > index ? std::strtoll(argv[index], nullptr, 10) : otherwise;
}

[[maybe_unused]] int run(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--inputs") == 0) return run_inputs(argv[2]);
  if (argc > 3 && std::strcmp(argv[1], "--join") == 0) return join(argv[2], argc - 3, argv + 3);
  const int64_t executions = number(argc, argv, 1, 10000);
  const int64_t seed = number(argc, argv, 2, 1), first = number(argc, argv, 3, 0);
  Counts counts;
  std::vector<uint8_t> whole;
  for (int64_t i = first; i < first + executions; ++i) {
    const bool small = i / kSameMatrix % kSmallMatrices != 0;
    if (whole.empty() || i % kSameMatrix == 0) {
      Random random(Random(static_cast<uint64_t>(seed)).next() ^ static_cast<uint64_t>(i / kSameMatrix));
      whole = random_matrix(small, random);
    }
    std::snprintf(current, sizeof current, "seed %lld, execution %lld", static_cast<long long>(seed),
                  static_cast<long long>(i));
    set_current_case(current);
    Random random(Random(static_cast<uint64_t>(seed + 1)).next() ^ static_cast<uint64_t>(i));
    execute(damaged(whole, random), small, random, &counts);
  }
  std::printf("%lld executions: %lld headers refused, %lld payloads that are not as sealed, %lld runs of kernels, "
              "all as the portable ones\n",
              static_cast<long long>(executions), static_cast<long long>(counts.refused),
              static_cast<long long>(counts.altered), static_cast<long long>(counts.kernels));
  // If all damage were refused, or none, the fuzzer would test nothing.
  const bool both = counts.refused > 0 && counts.altered > 0 && counts.kernels > 0;
  return executions < 1000 || both ? 0 : 1;
}

}  // namespace
}  // namespace lowbit::test

// AddressSanitizer calls this before it reports.
extern "C" __attribute__((visibility("default"))) void __asan_on_error() {
  std::fprintf(stderr, "%s\n", lowbit::test::current);
}

#if LOWBIT_GUIDED

// libFuzzer's mutations, which it learns from comparisons in the code.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Changes an input in place; returns the new size.
extern "C" __attribute__((visibility("default"))) size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size,
                                                                                 size_t max_size, unsigned int seed) {
  using namespace lowbit::test;
  Random random(seed);
  if (max_size < kSeedBytes) return 0;
  if (size < kSeedBytes || random.below(8) == 0) {
    const uint64_t choices = random.next();
    std::memcpy(data, &choices, kSeedBytes);
    if (size > kSeedBytes) return size;
  }
  std::vector<uint8_t> bytes;
  if (size <= kSeedBytes || random.below(64) == 0) {
    bytes = random_matrix(true, random);
  } else if (random.below(2) == 0) {
    bytes = damaged({data + kSeedBytes, data + size}, random);
  } else {
    size = LLVMFuzzerMutate(data + kSeedBytes, size - kSeedBytes, max_size - kSeedBytes);
    bytes.assign(data + kSeedBytes, data + kSeedBytes + size);
    seal_again(bytes, random);
  }
  bytes.resize(std::min(bytes.size(), max_size - kSeedBytes));
  std::copy(bytes.begin(), bytes.end(), data + kSeedBytes);
  return kSeedBytes + bytes.size();
}

extern "C" __attribute__((visibility("default"))) int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lowbit::test::Counts counts;
  lowbit::test::execute_input(data, size, &counts);
  return 0;
}

#else

int main(int argc, char** argv) {
  lowbit::test::install_crash_handler();
  return lowbit::test::run(argc, argv);
}

#endif
