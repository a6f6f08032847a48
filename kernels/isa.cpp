#include "isa.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "vector_length.h"

#if defined(__aarch64__) && defined(__APPLE__)
#include <TargetConditionals.h>
#include <sys/sysctl.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif
#elif defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace lowbit {
namespace {

constexpr auto kNames = [] {
#define LOWBIT_NAME(Name, NAME, name) IsaName{#name, k##Name, 0},
  std::array names{IsaName{"portable", kPortable, kPortable}, LOWBIT_ISAS(LOWBIT_NAME)};
#undef LOWBIT_NAME
  for (size_t i = 1; i < names.size(); ++i) names[i].allows = names[i - 1].allows | names[i].bit;
  return names;
}();

#if defined(__aarch64__)

// Call this only on CPUs with SME.
[[maybe_unused]] bool has_long_vectors() {
  const LongVectors vectors(true);
  return vector_bytes() == kLongVectorBytes;
}

#if defined(__APPLE__)
// `unknown`: the result if the system does not know the name.
bool sysctl_flag(const char* name, bool unknown = false) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value != 0 : unknown;
}

IsaBits detect(IsaBits) {
  IsaBits bits = kNeon;
  // macOS 11 lacks the name, but every Mac with Arm has the instructions. iOS 14 also lacks it, and runs on older CPUs.
  if (sysctl_flag("hw.optional.arm.FEAT_DotProd", TARGET_OS_OSX != 0)) bits |= kNeonDot;
  if (sysctl_flag("hw.optional.arm.FEAT_I8MM")) bits |= kI8mm;
  if (sysctl_flag("hw.optional.arm.FEAT_BF16")) bits |= kBf16;
  if (sysctl_flag("hw.optional.arm.FEAT_SME2") && has_long_vectors()) bits |= kSme2;
  return bits;
}
#elif defined(_WIN32)
// Numbers of PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, PF_ARM_V82_I8MM_..., PF_ARM_V86_BF16_... and PF_ARM_SVE2_...: older headers
// lack all but the first.
IsaBits detect(IsaBits) {
  IsaBits bits = kNeon;
  if (IsProcessorFeaturePresent(43)) bits |= kNeonDot;
  if (IsProcessorFeaturePresent(66)) bits |= kI8mm;
  if (IsProcessorFeaturePresent(68)) bits |= kBf16;
  if (IsProcessorFeaturePresent(47)) bits |= kSve2;
  return bits;
}
#else
#if !defined(__linux__)
// FreeBSD has the same bits under another name.
unsigned long getauxval(int type) {
  unsigned long value = 0;
  return elf_aux_info(type, &value, sizeof value) == 0 ? value : 0;
}
#endif

// Bit numbers of the Linux ABI; older C libraries lack the names for AT_HWCAP2.
constexpr unsigned long kHwcapAsimd = 1ul << 1;
constexpr unsigned long kHwcapAsimdDp = 1ul << 20;
constexpr unsigned long kHwcap2Sve2 = 1ul << 1;
constexpr unsigned long kHwcap2I8mm = 1ul << 13;
constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
constexpr unsigned long kHwcap2Sme2 = 1ul << 37;

IsaBits detect(IsaBits) {
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  IsaBits bits = kPortable;
  if (hwcap & kHwcapAsimd) bits |= kNeon;
  if (hwcap & kHwcapAsimdDp) bits |= kNeonDot;
  if (hwcap2 & kHwcap2I8mm) bits |= kI8mm;
  if (hwcap2 & kHwcap2Bf16) bits |= kBf16;
  if (hwcap2 & kHwcap2Sve2) bits |= kSve2;
  if ((hwcap2 & kHwcap2Sme2) && has_long_vectors()) bits |= kSme2;
  return bits;
}
#endif

#elif defined(__x86_64__)

// XCR0 lists the registers that the operating system saves. Features that need other registers must not be used.
uint64_t enabled_state() {
  uint32_t eax, edx;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (uint64_t{edx} << 32) | eax;
}

// Linux and Windows save the tile registers only of processes that request it. The answer is for all threads and is permanent:
// from then on every signal stack (sigaltstack) must have room for the tiles. The system refuses if a thread already has a
// smaller one.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#elif defined(_WIN32)
  // Available from Windows 11 and Server 2022 on.
  using Function = BOOL WINAPI(DWORD64 features);
  const auto enable = reinterpret_cast<Function*>(reinterpret_cast<void*>(
      GetProcAddress(GetModuleHandleW(L"kernel32.dll"), "EnableProcessOptionalXStateFeatures")));
  constexpr DWORD64 kTileData = DWORD64{1} << 18;
  return enable != nullptr && enable(kTileData);
#else
  return false;  // other systems are untested: if one requires a request, the first tile instruction ends the process
#endif
}

IsaBits detect(IsaBits allowed) {
  struct { unsigned a, b, c, d; } leaf1{}, leaf7{}, leaf71{};
  if (!__get_cpuid(1, &leaf1.a, &leaf1.b, &leaf1.c, &leaf1.d)) return kPortable;
  const auto has = [](unsigned reg, int bit) { return (reg >> bit) & 1u; };
  if (!has(leaf1.c, 27)) return kPortable;  // OSXSAVE
  __get_cpuid_count(7, 0, &leaf7.a, &leaf7.b, &leaf7.c, &leaf7.d);
  if (leaf7.a >= 1) __get_cpuid_count(7, 1, &leaf71.a, &leaf71.b, &leaf71.c, &leaf71.d);

  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTile = 0x60000;
  const uint64_t state = enabled_state();
  IsaBits bits = kPortable;
  const bool avx2 = (state & kYmm) == kYmm && has(leaf7.b, 5) && has(leaf1.c, 12) && has(leaf1.c, 29);
  if (avx2) bits |= kAvx2;
  if (avx2 && has(leaf71.a, 4)) bits |= kAvxVnni;
  if (avx2 && has(leaf71.d, 4)) bits |= kAvxVnniInt8;
  const bool avx512 = avx2 && (state & kZmm) == kZmm && has(leaf7.b, 16) && has(leaf7.b, 17) &&
                      has(leaf7.b, 30) && has(leaf7.b, 31) && has(leaf7.c, 11);
  if (avx512) bits |= kAvx512Vnni;
  const bool amx = avx512 && (state & kTile) == kTile && has(leaf7.d, 24) && has(leaf7.d, 25);
  if (amx && (allowed & kAmx) != 0 && may_use_tiles()) bits |= kAmx;
  return bits;
}

// Measured on CPUs of both makers: docs/internals/kernels.md, Memory.
Streams fastest_streams() {
  unsigned highest, name[3], version, other[3];
  if (!__get_cpuid(0, &highest, &name[0], &name[2], &name[1])) return Streams::one;
  if (std::memcmp(name, "GenuineIntel", sizeof name) == 0) return Streams::several;
  if (std::memcmp(name, "AuthenticAMD", sizeof name) != 0) return Streams::one;
  if (!__get_cpuid(1, &version, &other[0], &other[1], &other[2])) return Streams::one;
  constexpr unsigned kZen5 = 0x1a;
  const unsigned family = (version >> 8 & 15) + (version >> 20 & 255);  // of families above 15, which Zen's are
  return family >= kZen5 ? Streams::ahead : Streams::one;
}

#else

IsaBits detect(IsaBits) { return kPortable; }

#endif

#if !defined(__x86_64__)
Streams fastest_streams() { return Streams::one; }  // no kernel uses it
#endif

// The first value of LOWBIT_ISA that was read.
struct Cap {
  char name[64] = "";  // longer than any valid name
  const IsaName* entry = nullptr;
  Status status;
};

const Cap& cap() {
  static const Cap cap = [] {
    Cap result;
    const char* name = std::getenv("LOWBIT_ISA");
    if (name == nullptr || name[0] == '\0') return result;
    std::strncpy(result.name, name, sizeof result.name - 1);
    char known[128] = "";
    for (const IsaName& entry : kNames) {
      if (std::strcmp(entry.name, name) == 0) result.entry = &entry;
      std::strncat(known, known[0] ? ", " : "", sizeof known - std::strlen(known) - 1);
      std::strncat(known, entry.name, sizeof known - std::strlen(known) - 1);
    }
    if (result.entry == nullptr) {
      result.entry = &kNames[0];
      result.status = Status::error("LOWBIT_ISA is '%.32s'; expected one of: %s", name, known);
    }
    return result;
  }();
  return cap;
}

// The value of LOWBIT_STREAMS, or the default for the CPU.
struct Reading {
  Streams streams;
  Status status;
};

const Reading& reading() {
  static const Reading reading = [] {
    Reading result{fastest_streams(), {}};
    const char* const name = std::getenv("LOWBIT_STREAMS");
    if (name == nullptr || name[0] == '\0') return result;
    if (!streams_named(name, &result.streams)) {
      result.status = Status::error("LOWBIT_STREAMS is '%.32s'; expected one, ahead or several", name);
    }
    return result;
  }();
  return reading;
}

std::atomic<Streams>& current_streams() {
  static std::atomic<Streams> current{reading().streams};
  return current;
}

IsaBits allowed() { return cap().entry == nullptr ? ~IsaBits{0} : cap().entry->allows; }

}  // namespace

const IsaName* isa_names(size_t* count) {
  *count = kNames.size();
  return kNames.data();
}

IsaBits cpu_isa() {
  static const IsaBits bits = detect(allowed());
  return bits;
}

const char* isa_cap() { return cap().name[0] != '\0' ? cap().name : nullptr; }

const Status& isa_cap_status() { return cap().status.ok() ? reading().status : cap().status; }

Streams streams() { return current_streams().load(std::memory_order_relaxed); }
void pin_streams(Streams streams) { current_streams().store(streams, std::memory_order_relaxed); }

bool streams_named(const char* name, Streams* streams) {
  for (const Streams known : {Streams::one, Streams::ahead, Streams::several}) {
    if (std::strcmp(kStreamsNames[static_cast<int>(known)], name) != 0) continue;
    *streams = known;
    return true;
  }
  return false;
}

IsaBits active_isa() {
  static const IsaBits bits = cpu_isa() & allowed();
  return bits;
}

}  // namespace lowbit
