// Compiles only if the compiler supports the SME2 kernels: cmake/isa.cmake.
#if !defined(__clang__) || (defined(__apple_build_version__) ? __clang_major__ < 17 : __clang_major__ < 19)
#error "another compiler"
#endif
#include <arm_neon.h>
#include <arm_sme.h>

#include <cstdint>
#include <type_traits>

#if !defined(__ARM_FEATURE_SME2) || defined(__ARM_FEATURE_SVE)
#error "no SME2, or SVE outside of streaming mode"
#endif

void probe(svint8_t a, svuint8_t b, svfloat32x4_t c, svfloat32_t d) __arm_streaming __arm_inout("za") {
  svsumopa_za32_s8_m(0, svptrue_b8(), svptrue_b8(), a, b);
  svmla_single_za32_f32_vg1x4(0, c, d);
}
