// Measures the two peak rates (roofs) of this machine, and prints one line of JSON:
//
//   roofs [--mebibytes N] [--serve] [THREADS...]     numbers of threads; 1 by default
//
//   {"buffer_bytes": ..., "read_gbs": {"1": ...}, "int8_isa": "avx512vnni", "int8_gops": {"1": ...}}
//
// With --serve it then waits for lines, each with one of those numbers of threads. For each line it measures the bandwidth by
// one more pass, in the fastest pattern, and prints it. So a caller can measure bandwidth and something else in turns.
//
// read_gbs: 1e9 bytes per second from a buffer of N MiB (ops/read_bandwidth.h). int8_gops: 1e9 multiplications and additions
// per second of the CPU's widest int8 dot product, on registers only; null if there is none.

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "../kernels/isa.h"
#include "../ops/read_bandwidth.h"

namespace lowbit::bench {
namespace {

constexpr int64_t kSteps = 200'000;  // of 12 dot products: about a millisecond, short enough to be undisturbed
constexpr int kChains = 12;            // accumulators: covers latency 5 at two per cycle

struct DotProduct {
  const char* name;  // of the ISA
  void (*run)();     // executes kSteps * kChains dot products
  int64_t ops;       // multiplications and additions in one
};

// Assembly, so that the compiler cannot fold, spill or reorder anything.
#if defined(__x86_64__)
#define LOWBIT_TWELVE(op, r)                                                                                    \
  op r "1, " r "0, " r "2\n" op r "1, " r "0, " r "3\n" op r "1, " r "0, " r "4\n" op r "1, " r "0, " r "5\n"   \
  op r "1, " r "0, " r "6\n" op r "1, " r "0, " r "7\n" op r "1, " r "0, " r "8\n" op r "1, " r "0, " r "9\n"   \
  op r "1, " r "0, " r "10\n" op r "1, " r "0, " r "11\n" op r "1, " r "0, " r "12\n" op r "1, " r "0, " r "13\n"
#define LOWBIT_CLOBBERED \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14", "xmm15"

// A product of tiles of 16 x 64 and 64 x 16 takes 16 cycles, so fewer products run, each counted as several. Four accumulators.
constexpr int64_t kTileProducts = kSteps * kChains / 16;
void tdpbssd() {
  alignas(64) struct {
    uint8_t palette = 1, reserved[15] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } const config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  for (int64_t i = 0; i < kTileProducts; i += 4) {
    __asm__ volatile(
        "tdpbssd %tmm5, %tmm4, %tmm0\n"
        "tdpbssd %tmm5, %tmm4, %tmm1\n"
        "tdpbssd %tmm5, %tmm4, %tmm2\n"
        "tdpbssd %tmm5, %tmm4, %tmm3\n");
  }
  __asm__ volatile("tilerelease");
}
void vpdpbusd_512() {
  for (int64_t i = 0; i < kSteps; ++i) __asm__ volatile(LOWBIT_TWELVE("vpdpbusd ", "%%zmm") ::: LOWBIT_CLOBBERED);
}
void vpdpbusd_256() {
  for (int64_t i = 0; i < kSteps; ++i) {
    __asm__ volatile(LOWBIT_TWELVE("%{vex%} vpdpbusd ", "%%ymm") ::: LOWBIT_CLOBBERED);
  }
}
void vpdpbssd_256() {
  for (int64_t i = 0; i < kSteps; ++i) __asm__ volatile(LOWBIT_TWELVE("vpdpbssd ", "%%ymm") ::: LOWBIT_CLOBBERED);
}
// Without VNNI a dot product takes three instructions: sums of two products, sums of four, and the accumulation.
#define LOWBIT_MADD(n)                     \
  "vpmaddubsw %%ymm1, %%ymm0, %%ymm14\n"   \
  "vpmaddwd %%ymm1, %%ymm14, %%ymm14\n"    \
  "vpaddd %%ymm14, %%ymm" n ", %%ymm" n "\n"
void vpmaddubsw_256() {
  for (int64_t i = 0; i < kSteps; ++i) {
    __asm__ volatile(LOWBIT_MADD("2") LOWBIT_MADD("3") LOWBIT_MADD("4") LOWBIT_MADD("5") LOWBIT_MADD("6")
                         LOWBIT_MADD("7") LOWBIT_MADD("8") LOWBIT_MADD("9") LOWBIT_MADD("10") LOWBIT_MADD("11")
                             LOWBIT_MADD("12") LOWBIT_MADD("13")::: LOWBIT_CLOBBERED);
  }
}
constexpr struct {
  IsaBits isa;
  DotProduct dot;
} kDotProducts[] = {{kAmx, {"amx", tdpbssd, 2 * 16 * 16 * 64 / 16}},
                    {kAvx512Vnni, {"avx512vnni", vpdpbusd_512, 128}},
                    {kAvxVnniInt8, {"avxvnniint8", vpdpbssd_256, 64}},
                    {kAvxVnni, {"avxvnni", vpdpbusd_256, 64}},
                    {kAvx2, {"avx2", vpmaddubsw_256, 64}}};
#elif defined(__aarch64__)
#define LOWBIT_TWELVE(op, d, s)                                                                             \
  op " v2." d ", v0." s ", v1." s "\n" op " v3." d ", v0." s ", v1." s "\n" op " v4." d ", v0." s ", v1." s "\n"   \
  op " v5." d ", v0." s ", v1." s "\n" op " v6." d ", v0." s ", v1." s "\n" op " v7." d ", v0." s ", v1." s "\n"   \
  op " v16." d ", v0." s ", v1." s "\n" op " v17." d ", v0." s ", v1." s "\n" op " v18." d ", v0." s ", v1." s "\n" \
  op " v19." d ", v0." s ", v1." s "\n" op " v20." d ", v0." s ", v1." s "\n" op " v21." d ", v0." s ", v1." s "\n"
#define LOWBIT_CLOBBERED "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21"

void smmla() {
  for (int64_t i = 0; i < kSteps; ++i) {
    __asm__ volatile(".arch armv8.2-a+i8mm\n" LOWBIT_TWELVE("smmla", "4s", "16b") ::: LOWBIT_CLOBBERED);
  }
}
void sdot() {
  for (int64_t i = 0; i < kSteps; ++i) {
    __asm__ volatile(".arch armv8.2-a+dotprod\n" LOWBIT_TWELVE("sdot", "4s", "16b") ::: LOWBIT_CLOBBERED);
  }
}
void smlal() {
  for (int64_t i = 0; i < kSteps; ++i) __asm__ volatile(LOWBIT_TWELVE("smlal", "8h", "8b") ::: LOWBIT_CLOBBERED);
}
constexpr struct {
  IsaBits isa;
  DotProduct dot;
} kDotProducts[] = {{kI8mm, {"i8mm", smmla, 64}}, {kNeonDot, {"neondot", sdot, 32}}, {kNeon, {"neon", smlal, 16}}};
#else
constexpr struct {
  IsaBits isa;
  DotProduct dot;
} kDotProducts[] = {{~IsaBits{0}, {"", nullptr, 0}}};
#endif

const DotProduct* widest_dot_product() {
  for (const auto& row : kDotProducts) {
    if ((row.isa & ~cpu_isa()) == 0) return &row.dot;
  }
  return nullptr;
}

// 1e9 operations per second, the best of a hundred short passes.
double int8_gops(const DotProduct& dot, int threads) {
  double best = 0.0;
  for (int pass = 0; pass < 100; ++pass) {
    const double seconds = seconds_together(threads, [&](int) { dot.run(); });
    best = std::max(best, 1e-9 * static_cast<double>(kSteps) * kChains * dot.ops * threads / seconds);
  }
  return best;
}

uint8_t* map(int64_t bytes) {
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // so that page walks do not count
#endif
  std::memset(memory, 1, static_cast<size_t>(bytes));
  return static_cast<uint8_t*>(memory);
}

int usage(const char* found) {
  std::fprintf(stderr, "roofs: %s; expected [--mebibytes N] [--serve] [THREADS...], numbers from 1 to 65536\n", found);
  return 2;
}

std::string entry(int threads, double value) {
  char text[64];
  std::snprintf(text, sizeof text, "\"%d\": %.4g", threads, value);
  return text;
}

int run(int argc, char** argv) {
  int64_t mebibytes = 1024;
  bool serve = false;
  std::vector<int> thread_counts;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--serve") == 0) {
      serve = true;
      continue;
    }
    const bool size = std::strcmp(argv[i], "--mebibytes") == 0;
    if (size && ++i == argc) return usage("--mebibytes without a number");
    char* end;
    const long number = std::strtol(argv[i], &end, 10);
    if (*end != '\0' || end == argv[i] || number < 1 || number > 65536) return usage(argv[i]);
    if (size) {
      mebibytes = number;
    } else {
      thread_counts.push_back(static_cast<int>(number));
    }
  }
  if (thread_counts.empty()) thread_counts.push_back(1);

  const int64_t bytes = mebibytes << 20;
  const uint8_t* memory = map(bytes);
  if (memory == nullptr) {
    std::fprintf(stderr, "roofs: no memory for a buffer of %lld MiB\n", static_cast<long long>(mebibytes));
    return 1;
  }
  const DotProduct* dot = widest_dot_product();
  std::string reads, ops;
  std::map<int, Pattern> patterns;  // by threads
  for (const int threads : thread_counts) {
    const char* comma = reads.empty() ? "" : ", ";
    const Bandwidth found = read_bandwidth(memory, bytes, threads, 3);
    reads += comma + entry(threads, 1e-9 * found.bytes_per_second);
    patterns[threads] = found.pattern;
    if (dot != nullptr) ops += comma + entry(threads, int8_gops(*dot, threads));
  }
  std::printf("{\"buffer_bytes\": %lld, \"read_gbs\": {%s}, \"int8_isa\": ",
              static_cast<long long>(bytes), reads.c_str());
  if (dot != nullptr) {
    std::printf("\"%s\", \"int8_gops\": {%s}}\n", dot->name, ops.c_str());
  } else {
    std::printf("null, \"int8_gops\": null}\n");
  }
  std::fflush(stdout);
  for (int threads; serve && std::scanf("%d", &threads) == 1 && patterns.count(threads) != 0;) {
    read_pass(memory, bytes, threads, patterns[threads]);  // wakes the CPU, which is slower after a pause
    std::printf("%.4g\n", 1e-9 * read_pass(memory, bytes, threads, patterns[threads]));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace lowbit::bench

int main(int argc, char** argv) { return lowbit::bench::run(argc, argv); }
