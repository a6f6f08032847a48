// A thread's settings for rounding and subnormal numbers.
#pragma once

#include <cfenv>
#include <cstdint>

namespace lowbit {

// Equal bits on every thread require equal settings: rounding to nearest, and subnormal numbers kept. Both are per thread, and
// a host may have changed them (torch.set_flush_denormal, -ffast-math's startup code). During its lifetime, this object gives
// its thread the default settings. They are written only if they differ.
class DefaultFloats {
 public:
  DefaultFloats() : found_(read()) {
    if (differs(found_)) write(kDefault);
  }
  ~DefaultFloats() {
    if (differs(found_)) write(found_);
  }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
#if defined(__x86_64__)
  using Settings = uint32_t;  // MXCSR
  static constexpr Settings kDefault = 0x1f80;
  static bool differs(Settings settings) { return ((settings ^ kDefault) & ~kHappened) != 0; }
  static constexpr Settings kHappened = 0x3f;  // status flags, not settings
  static Settings read() {
    Settings settings;
    __asm__ volatile("stmxcsr %0" : "=m"(settings)::"memory");
    return settings;
  }
  static void write(Settings settings) { __asm__ volatile("ldmxcsr %0" ::"m"(settings) : "memory"); }
#elif defined(__aarch64__)
  using Settings = uint64_t;  // FPCR
  static constexpr Settings kDefault = 0;
  static bool differs(Settings settings) { return settings != kDefault; }
  static Settings read() {
    Settings settings;
    __asm__ volatile("mrs %0, fpcr" : "=r"(settings)::"memory");
    return settings;
  }
  static void write(Settings settings) { __asm__ volatile("msr fpcr, %0" ::"r"(settings) : "memory"); }
#else
  using Settings = std::fenv_t;
  static inline const Settings& kDefault = *FE_DFL_ENV;
  static bool differs(const Settings&) { return true; }
  static Settings read() {
    Settings settings;
    std::fegetenv(&settings);
    return settings;
  }
  static void write(const Settings& settings) { std::fesetenv(&settings); }
#endif

  const Settings found_;
};

}  // namespace lowbit
