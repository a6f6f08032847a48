// Runs once per value of LOWBIT_ISA: the cap holds, and the operators run the capped kernels.
//
// All kernels return the same bits, so the result of an operator does not show which one ran. Therefore, on Linux, this program
// defines choose_linear() and its siblings itself, and the dynamic linker uses them in liblowbit.so. They call the library's
// functions, and return a copy of the kernel whose function records the call before it calls the real one.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "../../kernels/registry.h"
#include "../../ops/sme_threads.h"
#include "support/coverage.h"
#include "support/tensors.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif
#endif

namespace lowbit {
namespace {

// What the operators requested and ran.
struct Seen {
  IsaBits isa = ~IsaBits{0};
  std::string ran;
};
Seen seen_quantize, seen_linear, seen_embedding;

#if defined(__linux__)
const QuantizeKernel* real_quantize;
std::atomic<const LinearKernel*> real_linear, real_beside;  // linear_experts() chooses on each of its threads
const EmbeddingKernel* real_embedding;

// Which threads ran the chosen kernel, and how often the alternative kernel ran.
std::mutex linear_mutex;
std::set<std::thread::id> linear_threads;
std::atomic<int> beside_runs{0};

#if defined(__aarch64__)
constexpr int kSetSmeLength = 63, kGetSmeLength = 64;  // for prctl; the length is in bytes
int shortest_sme_length = 64;  // among threads that ran an SME2 kernel
int sme_length() { return prctl(kGetSmeLength) & 0xffff; }
#endif

void run_beside(const LinearArgs& args) { ++beside_runs, real_beside.load()->run(args); }
void run_quantize(const QuantizeArgs& args) { seen_quantize.ran = real_quantize->name, real_quantize->run(args); }
void run_linear(const LinearArgs& args) {
  {
    const std::lock_guard lock(linear_mutex);
    seen_linear.ran = real_linear.load()->name;
    linear_threads.insert(std::this_thread::get_id());
#if defined(__aarch64__)
    if ((real_linear.load()->isa & kSme2) != 0) shortest_sme_length = std::min(shortest_sme_length, sme_length());
#endif
  }
  EXPECT_EQ(reinterpret_cast<uintptr_t>(args.scratch) % 64, 0u);
  std::memset(args.scratch, 0xff, kLinearScratchBytes);  // the kernel must not depend on the content of its scratch memory
  real_linear.load()->run(args);
}
void run_embedding(const EmbeddingArgs& args) { seen_embedding.ran = real_embedding->name, real_embedding->run(args); }

// The library's definition of the function with this (C++) symbol.
template <class Function>
Function* next(const char* symbol) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, symbol));
}
#endif

}  // namespace

#if defined(__linux__)
const QuantizeKernel& choose_quantize(IsaBits isa) {
  static auto* const real = next<const QuantizeKernel&(IsaBits)>("_ZN6lowbit15choose_quantizeEj");
  real_quantize = &real(isa);
  static QuantizeKernel copy;
  copy = *real_quantize;
  copy.run = run_quantize;
  seen_quantize.isa = isa;
  return copy;
}

const LinearKernel& choose_linear(const Layout& layout, int64_t m, IsaBits isa, Streams streams) {
  static auto* const real =
      next<const LinearKernel&(const Layout&, int64_t, IsaBits, Streams)>(
      "_ZN6lowbit13choose_linearERK13lowbit_layoutljNS_7StreamsE");
  if ((active_isa() & ~isa & kSme2) != 0) {  // requested second
    real_beside = &real(layout, m, isa, streams);
    static thread_local LinearKernel copy_beside;
    copy_beside = *real_beside.load();
    copy_beside.run = run_beside;
    return copy_beside;
  }
  real_linear = &real(layout, m, isa, streams);
  static thread_local LinearKernel copy;
  copy = *real_linear.load();
  copy.run = run_linear;
  const std::lock_guard lock(linear_mutex);
  seen_linear.isa = isa;
  return copy;
}

const EmbeddingKernel& choose_embedding(const Layout& layout, IsaBits isa) {
  static auto* const real =
      next<const EmbeddingKernel&(const Layout&, IsaBits)>("_ZN6lowbit16choose_embeddingERK13lowbit_layoutj");
  real_embedding = &real(layout, isa);
  static EmbeddingKernel copy;
  copy = *real_embedding;
  copy.run = run_embedding;
  seen_embedding.isa = isa;
  return copy;
}
#endif

namespace test {
namespace {

const IsaName* entry_of(const char* name) {
  size_t count;
  const IsaName* names = isa_names(&count);
  for (size_t i = 0; name != nullptr && i < count; ++i) {
    if (std::strcmp(names[i].name, name) == 0) return names + i;
  }
  return nullptr;
}

TEST(IsaCap, HoldsForActiveIsa) {
  const char* cap = std::getenv("LOWBIT_ISA");
  if (cap == nullptr || cap[0] == '\0') {
    EXPECT_EQ(isa_cap(), nullptr);
    EXPECT_TRUE(isa_cap_status().ok());
    EXPECT_EQ(active_isa(), cpu_isa());
  } else if (const IsaName* entry = entry_of(cap)) {
    EXPECT_STREQ(isa_cap(), cap);
    EXPECT_TRUE(isa_cap_status().ok());
    EXPECT_EQ(active_isa(), cpu_isa() & entry->allows);
  } else {
    EXPECT_STREQ(isa_cap(), cap);
    EXPECT_EQ(active_isa(), kPortable);
    const Status status = isa_cap_status();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::strstr(status.message(), cap), nullptr) << status.message();
    size_t count;
    const IsaName* names = isa_names(&count);
    for (size_t i = 0; i < count; ++i)
      EXPECT_NE(std::strstr(status.message(), names[i].name), nullptr) << names[i].name;
  }
}

#if defined(__linux__) && defined(__x86_64__)
// What the system reports of the CPU: its features, except those whose registers it does not save.
TEST(IsaCap, TheBitsAreThoseOfTheSystem) {
  if (std::getenv("QEMU_CPU") != nullptr) GTEST_SKIP() << "QEMU shows the /proc/cpuinfo of the machine that it runs on";
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && line.rfind("flags", 0) != 0) continue;
  if (line.rfind("flags", 0) != 0) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  line += ' ';
  const auto has = [&](const char* flag) { return line.find(std::string(" ") + flag + ' ') != std::string::npos; };
  EXPECT_EQ((cpu_isa() & kAvx2) != 0, has("avx2") && has("fma") && has("f16c"));
  EXPECT_EQ((cpu_isa() & kAvxVnni) != 0, has("avx_vnni"));
  EXPECT_EQ((cpu_isa() & kAvx512Vnni) != 0, has("avx512_vnni"));
  // Linux does not list it, but only CPUs with AVX-VNNI have it.
  EXPECT_TRUE((cpu_isa() & kAvxVnniInt8) == 0 || has("avx_vnni"));
}

// The permission for tile registers is permanent and requires larger signal stacks, so it must not be requested needlessly.
TEST(IsaCap, HoldsForThePermissionToUseTiles) {
  constexpr long kGetPermission = 0x1022;
  constexpr uint64_t kTileData = uint64_t{1} << 18;
  const IsaBits isa = active_isa();
  uint64_t permitted = 0;
  if (syscall(SYS_arch_prctl, kGetPermission, &permitted) != 0) permitted = 0;  // Linux before 5.16: no tiles
  EXPECT_EQ((permitted & kTileData) != 0, (isa & kAmx) != 0);
}

[[noreturn]] void exit_with_a_small_signal_stack() {
  static char stack[4096];
  const stack_t small{.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof stack};
  if (sigaltstack(&small, nullptr) != 0) std::exit(2);
  std::exit((active_isa() & kAmx) != 0 ? 1 : 0);
}

// If a thread's signal stack is too small for tiles, the system refuses, and AVX-512 VNNI is used.
TEST(IsaCap, ASmallSignalStackLeavesOutTiles) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process, which has not determined its ISA yet
  EXPECT_EXIT(exit_with_a_small_signal_stack(), testing::ExitedWithCode(0), "");
}
#endif

#if defined(__linux__) && defined(__aarch64__)
// What the system reports of the CPU, with Linux's bit numbers.
TEST(IsaCap, TheBitsAreThoseOfTheSystem) {
  const unsigned long hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
  const auto has = [](unsigned long word, int bit) { return (word >> bit & 1) != 0; };
  EXPECT_EQ((cpu_isa() & kNeon) != 0, has(hwcap, 1));
  EXPECT_EQ((cpu_isa() & kNeonDot) != 0, has(hwcap, 20));
  EXPECT_EQ((cpu_isa() & kI8mm) != 0, has(hwcap2, 13));
  EXPECT_EQ((cpu_isa() & kBf16) != 0, has(hwcap2, 14));
  EXPECT_EQ((cpu_isa() & kSve2) != 0, has(hwcap2, 1));
}

TEST(IsaCap, Sme2WantsACpuWithVectorsOf512Bits) {
  constexpr unsigned long kHwcap2Sme2 = 1ul << 37;
  bool has = false;
  std::thread([&] { has = (prctl(kSetSmeLength, 64) & 0xffff) == 64; }).join();  // the length is per thread
  has = has && (getauxval(AT_HWCAP2) & kHwcap2Sme2) != 0;
  EXPECT_EQ((cpu_isa() & kSme2) != 0, has);
}

Tensor linear_of(const Tensor& x, const Tensor& weight) {
  Tensor out(ElementType::f32, {x.view.shape.size[0], 80});
  const Status status = linear(x.view, weight.view, 80, out.view, {});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

// Threads beyond the limit for the matrix unit run other kernels, with the same bits.
TEST(IsaCap, SomeThreadsUseTheMatrixUnit) {
  if ((active_isa() & kSme2) == 0) GTEST_SKIP() << "no SME2";
  ASSERT_TRUE(sme_threads_status().ok());
  Random random(1);
  const Layout layout = layout_of(2048, 256, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  for (const int64_t m : {1, 40}) {
    const Tensor x = random_tensor(ElementType::f32, {m, 256}, random);
    const Tensor expected(ElementType::f32, {m, 2048}), found(ElementType::f32, {m, 2048});
    ASSERT_TRUE(linear(x.view, weight.view, 2048, expected.view, {}).ok());
    linear_threads.clear();
    beside_runs = 0;
    for (int tries = 0; tries < 100 && beside_runs == 0; ++tries) {  // threads may start after all work is done
      linear_threads.clear();
      ASSERT_TRUE(linear(x.view, weight.view, 2048, found.view, threads(4)).ok());
      EXPECT_EQ(found.bytes(), expected.bytes());
      EXPECT_LE(linear_threads.size(), static_cast<size_t>(sme_threads()));
      if (sme_threads() >= 4) break;
    }
    EXPECT_EQ(beside_runs > 0, sme_threads() < 4);
  }
}

TEST(IsaCap, SomeThreadsOfExpertsUseTheMatrixUnit) {
  if ((active_isa() & kSme2) == 0) GTEST_SKIP() << "no SME2";
  Random random(1);
  constexpr int64_t kOutputs = 512, kExperts = 4;
  const Layout layout = layout_of(kOutputs, 256, 4, 32, Mapping::symmetric, false);
  std::vector<uint8_t> bytes;
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    const std::vector<uint8_t> one = packed(random_weights(layout, random));
    bytes.insert(bytes.end(), one.begin(), one.end());
  }
  const Tensor weights(ElementType::u8, {kExperts, layout.total_bytes});
  std::memcpy(weights.memory->data(), bytes.data(), bytes.size());
  for (const int64_t m : {4, 80}) {  // rows per expert: one and twenty
    const Tensor x = random_tensor(ElementType::f32, {m, 256}, random);
    const Tensor experts(ElementType::i64, {m, 1});
    for (int64_t row = 0; row < m; ++row) reinterpret_cast<int64_t*>(experts.memory->data())[row] = row % kExperts;
    const Tensor expected(ElementType::f32, {m, 1, kOutputs}), found(ElementType::f32, {m, 1, kOutputs});
    ASSERT_TRUE(linear_experts(x.view, weights.view, experts.view, kOutputs, expected.view, {}).ok());
    beside_runs = 0;
    for (int tries = 0; tries < 100 && beside_runs == 0; ++tries) {  // threads may start after all work is done
      linear_threads.clear();
      const Status status = linear_experts(x.view, weights.view, experts.view, kOutputs, found.view, threads(4));
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(found.bytes(), expected.bytes());
      EXPECT_LE(linear_threads.size(), static_cast<size_t>(sme_threads()));
      if (sme_threads() >= 4) break;
    }
    EXPECT_EQ(beside_runs > 0, sme_threads() < 4);
  }
}

// Threads run SME2 kernels with vectors of 512 bits, and have their previous length afterwards.
TEST(IsaCap, Sme2LeavesThreadsTheirLength) {
  if ((active_isa() & kSme2) == 0 || sme_threads() == 0) GTEST_SKIP() << "no SME2";
  Random random(1);
  const Layout layout = layout_of(2048, 256, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  const Tensor weights(ElementType::u8, {1, layout.total_bytes});
  std::memcpy(weights.memory->data(), weight.memory->data(), static_cast<size_t>(layout.total_bytes));
  const Tensor x = random_tensor(ElementType::f32, {40, 256}, random), experts(ElementType::i64, {40, 1});
  std::memset(experts.memory->data(), 0, 40 * sizeof(int64_t));
  const Tensor expected(ElementType::f32, {40, 2048});
  ASSERT_TRUE(linear(x.view, weight.view, 2048, expected.view, {}).ok());
  for (const int wanted : {0, 16, 32, 64}) {
    std::thread([&] {
      if (wanted != 0 && (prctl(kSetSmeLength, wanted) & 0xffff) != wanted) return;  // a length that this CPU lacks
      const int length = prctl(kGetSmeLength);
      for (const Parallel& parallel : {Parallel{}, threads(3)}) {
        const Tensor found(ElementType::f32, {40, 2048}), of_expert(ElementType::f32, {40, 1, 2048});
        shortest_sme_length = 64;
        linear_threads.clear();
        EXPECT_TRUE(linear(x.view, weight.view, 2048, found.view, parallel).ok());
        EXPECT_TRUE(linear_experts(x.view, weights.view, experts.view, 2048, of_expert.view, parallel).ok());
        EXPECT_FALSE(linear_threads.empty());
        EXPECT_EQ(seen_linear.ran, "linear_a8w4_5x32_sme2");
        EXPECT_EQ(shortest_sme_length, 64);
        EXPECT_EQ(found.bytes(), expected.bytes());
        EXPECT_EQ(of_expert.bytes(), expected.bytes());
        EXPECT_EQ(prctl(kGetSmeLength), length);
      }
    }).join();
  }
}

// If a caller's ZA is live, other kernels do the work.
TEST(IsaCap, Sme2IsLeftAloneWhereItCannotBeUsed) {
  if ((active_isa() & kSme2) == 0) GTEST_SKIP() << "no SME2";
  Random random(1);
  const int length = prctl(kGetSmeLength);
  for (int bits = 1; bits <= 8; ++bits) {
    const Layout layout = layout_of(80, 208, bits, 48, Mapping::affine, false);
    const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
    for (const int64_t m : {1, 3, 20}) {
      const Tensor x = random_tensor(ElementType::f32, {m, 208}, random), expected = linear_of(x, weight);
      uint64_t live = reinterpret_cast<uint64_t>(&live), after = 0;
      __asm__ volatile("msr S3_3_C13_C0_5, %0" : : "r"(live));  // TPIDR2_EL0
      const Tensor found = linear_of(x, weight);
      __asm__ volatile("mrs %0, S3_3_C13_C0_5\n\tmsr S3_3_C13_C0_5, xzr" : "=&r"(after));
      EXPECT_EQ(found.bytes(), expected.bytes());
      EXPECT_EQ(after, live);
      EXPECT_EQ(prctl(kGetSmeLength), length);
    }
  }
}
#endif

TEST(Streams, AreThoseThatWereAskedFor) {
  const char* const text = std::getenv("LOWBIT_STREAMS");
  const std::string wanted = text == nullptr ? "" : text;
  Random random(1);
  const Layout layout = layout_of(150, 200, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  const Tensor x = random_tensor(ElementType::f32, {1, 200}, random), out(ElementType::f32, {1, 150});
  if (wanted == "many") {
    EXPECT_TRUE(refused(linear(x.view, weight.view, 150, out.view, {}),
                        "LOWBIT_STREAMS is 'many'; expected one, ahead or several"));
    return;
  }
  if (!isa_cap_status().ok()) GTEST_SKIP() << "the operators refuse";
  if (!wanted.empty()) {
    EXPECT_EQ(kStreamsNames[static_cast<int>(streams())], wanted);
  }
  const Streams before = streams();
  for (const Streams pinned : {Streams::several, Streams::one, Streams::ahead, before}) {
    pin_streams(pinned);
    EXPECT_EQ(streams(), pinned);
    const Tensor found(ElementType::f32, {1, 150});
    for (int threads_of_call = 1; threads_of_call <= 3; ++threads_of_call) {
      ASSERT_TRUE(linear(x.view, weight.view, 150, found.view, threads(threads_of_call)).ok());
      if (pinned == Streams::several && threads_of_call == 1) std::memcpy(out.view.data, found.view.data, 150 * 4);
      EXPECT_EQ(found.bytes(), out.bytes());
    }
#if defined(__linux__) && defined(__x86_64__)
    const bool has_interleaved_rows = (active_isa() & kAvx512Vnni) != 0;
    const std::string expected = pinned == Streams::several && has_interleaved_rows ? "linear_a8w4_1x64_" : "linear_a8w4_1x";
    EXPECT_EQ(seen_linear.ran.substr(0, expected.size()), expected);
    EXPECT_EQ(seen_linear.ran.find("1x64_") != std::string::npos, pinned == Streams::several && has_interleaved_rows);
#endif
  }
}

TEST(IsaCap, SmeThreadsAreANumber) {
  const char* const text = std::getenv("LOWBIT_SME_THREADS");
  if (text == nullptr || text[0] == '\0') {
    EXPECT_GE(sme_threads(), 1);
  } else if (std::strcmp(text, "many") != 0) {
    EXPECT_EQ(sme_threads(), std::atoi(text));
  } else {
    Random random(1);
    const Layout layout = layout_of(20, 64, 4, 32, Mapping::symmetric, false);
    const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
    const Tensor x = random_tensor(ElementType::f32, {3, 64}, random), out(ElementType::f32, {3, 20});
    EXPECT_TRUE(refused(linear(x.view, weight.view, 20, out.view, {}),
                        "LOWBIT_SME_THREADS is 'many'; expected a number from 0 to 1024"));
    const Tensor index(ElementType::i64, {3, 1}), outs(ElementType::f32, {3, 1, 20});
    EXPECT_TRUE(refused(linear_experts(x.view, weight.view, index.view, 20, outs.view, {}),
                        "LOWBIT_SME_THREADS is 'many'; expected a number from 0 to 1024"));
  }
}

// A null or empty `value` unsets the variable.
void set_environment(const char* name, const char* value) {
#ifdef _WIN32
  _putenv_s(name, value == nullptr ? "" : value);
#else
  if (value == nullptr) unsetenv(name);
  else setenv(name, value, 1);
#endif
}

TEST(IsaCap, IsReadOnce) {
  const std::string before = isa_cap() == nullptr ? "" : isa_cap();
  const char* const old = std::getenv("LOWBIT_ISA");
  const std::string kept = old == nullptr ? "" : old;
  set_environment("LOWBIT_ISA", "portable");
  EXPECT_STREQ(std::getenv("LOWBIT_ISA"), "portable");
  EXPECT_EQ(isa_cap() == nullptr ? "" : isa_cap(), before);
  set_environment("LOWBIT_ISA", old == nullptr ? nullptr : kept.c_str());
}

// With an unknown name in LOWBIT_ISA, every operator returns an error and no result.
TEST(IsaCap, OperatorsRefuseAWrongName) {
  if (isa_cap_status().ok()) GTEST_SKIP() << "LOWBIT_ISA is a name, or not set";
  Random random(1);
  const Layout layout = layout_of(20, 64, 4, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  const Tensor x = random_tensor(ElementType::f32, {3, 64}, random), out(ElementType::f32, {3, 20});
  EXPECT_TRUE(refused(linear(x.view, weight.view, 20, out.view, {}), "LOWBIT_ISA is 'nonsense'; expected one of: "));
  const Tensor indices = index_tensor<int64_t>({3}), rows(ElementType::f32, {1, 64});
  EXPECT_TRUE(refused(embedding(indices.view, weight.view, 64, rows.view, {}), "LOWBIT_ISA is 'nonsense'"));
  const Tensor q = random_tensor(ElementType::f32, {1, 1, 1, 16}, random);
  const Tensor keys = random_tensor(ElementType::f32, {1, 1, 16, 16}, random);
  const Tensor start = index_tensor<int64_t>({0}), attended(ElementType::f32, {1, 1, 1, 16});
  EXPECT_TRUE(refused(attention(q.view, q.view, q.view, keys.view, keys.view, start.view, {1.0}, attended.view, {}),
                      "LOWBIT_ISA is 'nonsense'"));
  const Tensor codes(ElementType::u8, {20, 64}), scales(ElementType::f32, {20, 2}), mins(ElementType::f32, {0, 0});
  EXPECT_TRUE(refused(pack(codes.view, scales.view, nullptr, nullptr, 4, 32, out.view, {}),
                      "LOWBIT_ISA is 'nonsense'"));
  EXPECT_TRUE(refused(unpack(weight.view, codes.view, scales.view, mins.view, mins.view, {}),
                      "LOWBIT_ISA is 'nonsense'"));
  EXPECT_TRUE(refused(repack(weight.view, "panel16", codes.view, {}), "LOWBIT_ISA is 'nonsense'"));
  EXPECT_TRUE(refused(quantize(x.view, 4, 32, false, false, codes.view, scales.view, mins.view, {}),
                      "LOWBIT_ISA is 'nonsense'"));
}

#if defined(__linux__)
// The first kernel of the tables (best first) that fits, computed here from the tables alone.
const LinearKernel* best_linear(const Layout& layout, int64_t m, IsaBits isa) {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& row = linear_kernel(i);
    const bool fits = row.bits == layout.bits && row.m_least <= m && (!row.several_streams || streams() == Streams::several);
    const bool takes = row.supports == nullptr || row.supports(row.context, layout, m, isa);
    if (fits && takes && (row.isa & ~isa) == 0) return &row;
  }
  return nullptr;
}

TEST(IsaCap, HoldsForTheOperators) {
  if (!isa_cap_status().ok()) GTEST_SKIP() << "LOWBIT_ISA has an unknown name, which the operators refuse";
  const IsaName* entry = entry_of(std::getenv("LOWBIT_ISA"));
  const bool is_set = isa_cap() != nullptr;
  const IsaBits expected = !is_set ? cpu_isa() : entry != nullptr ? cpu_isa() & entry->allows : IsaBits{kPortable};
  Random random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t group_size : {32, 48}) {
      const Layout layout = layout_of(20, 64, bits, group_size, Mapping::symmetric, false);
      Tensor packed_weight = bytes_tensor(packed(random_weights(layout, random)));
      for (const int64_t m : {1, 4, 9}) {
        seen_quantize = {}, seen_linear = {};
        Tensor x = random_tensor(ElementType::f32, {m, 64}, random), out(ElementType::f32, {m, 20});
        const Status status = linear(x.view, packed_weight.view, 20, out.view, {});
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(seen_linear.isa, expected);
        EXPECT_EQ(seen_quantize.isa, expected);
        EXPECT_EQ(seen_linear.ran, best_linear(layout, m, expected)->name);
        EXPECT_FALSE(seen_quantize.ran.empty());
      }
    }
    seen_embedding = {};
    const Layout layout = layout_of(20, 64, bits, 32, Mapping::symmetric, false);
    Tensor packed_weight = bytes_tensor(packed(random_weights(layout, random)));
    Tensor indices = index_tensor<int64_t>({3, 19}), rows(ElementType::f32, {2, 64});
    const Status status = embedding(indices.view, packed_weight.view, 64, rows.view, {});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(seen_embedding.isa, expected);
    EXPECT_FALSE(seen_embedding.ran.empty());
  }
}
#endif

}  // namespace
}  // namespace test
}  // namespace lowbit
