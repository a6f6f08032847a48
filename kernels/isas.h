// The list of instruction sets and of the tables of kernels. An instruction set also has a bit (lowbit_ukernel.h), a detection
// (isa.cpp) and compiler flags (cmake/isa.cmake).
#pragma once

// ISA(Name, NAME, name), weakest first. LOWBIT_ISA=name also allows the names before it in the list.
#define LOWBIT_ARM_ISAS(ISA)     \
  ISA(Neon, NEON, neon)          \
  ISA(NeonDot, NEONDOT, neondot) \
  ISA(I8mm, I8MM, i8mm)          \
  ISA(Bf16, BF16, bf16)          \
  ISA(Sve2, SVE2, sve2)          \
  ISA(Sme2, SME2, sme2)
#define LOWBIT_X86_ISAS(ISA)                 \
  ISA(Avx2, AVX2, avx2)                      \
  ISA(AvxVnni, AVXVNNI, avxvnni)             \
  ISA(AvxVnniInt8, AVXVNNIINT8, avxvnniint8) \
  ISA(Avx512Vnni, AVX512VNNI, avx512vnni)    \
  ISA(Amx, AMX, amx)

// TABLE(Family, Name) for each table k<Family><Name> except the portable one, best first: the first kernel that fits a task and
// the CPU is chosen. LOWBIT_VECTOR_TABLES is for the families that do not multiply bytes.
#if defined(__aarch64__)
#define LOWBIT_ISAS LOWBIT_ARM_ISAS
#if defined(LOWBIT_WITHOUT_SME2)  // no compiler supports it: cmake/isa.cmake
#define LOWBIT_SME2_TABLE(TABLE, Family)
#else
#define LOWBIT_SME2_TABLE(TABLE, Family) TABLE(Family, Sme2)
#endif
#define LOWBIT_LINEAR_TABLES(TABLE, Family)                                              \
  LOWBIT_SME2_TABLE(TABLE, Family) TABLE(Family, I8mm)                                   \
  TABLE(Family, TilesNeonDot) TABLE(Family, NeonDot)                                     \
  TABLE(Family, TilesNeon) TABLE(Family, WideTilesNeon) TABLE(Family, NarrowNeon) TABLE(Family, Neon)
#define LOWBIT_ATTENTION_TABLES(TABLE, Family) TABLE(Family, NeonDot) TABLE(Family, Neon)
#define LOWBIT_VECTOR_TABLES(TABLE, Family) TABLE(Family, Neon)
#elif defined(__x86_64__)
#define LOWBIT_ISAS LOWBIT_X86_ISAS
#if defined(LOWBIT_WITHOUT_AVXVNNIINT8)  // no assembler supports it: cmake/isa.cmake
#define LOWBIT_INT8_TABLE(TABLE, Family)
#else
#define LOWBIT_INT8_TABLE(TABLE, Family) TABLE(Family, AvxVnniInt8)
#endif
#define LOWBIT_LINEAR_TABLES(TABLE, Family)                                                               \
  TABLE(Family, Amx) TABLE(Family, UnpackedAvx512Vnni) TABLE(Family, TwoRowsAvx512Vnni)                   \
  TABLE(Family, NarrowAvx512Vnni) TABLE(Family, WideAvx512Vnni) TABLE(Family, Avx512Vnni)                 \
  LOWBIT_INT8_TABLE(TABLE, Family) TABLE(Family, AvxVnni) TABLE(Family, NarrowAvx2) TABLE(Family, WideAvx2) TABLE(Family, Avx2)
#define LOWBIT_ATTENTION_TABLES(TABLE, Family) TABLE(Family, Avx512Vnni) TABLE(Family, AvxVnni) TABLE(Family, Avx2)
#define LOWBIT_VECTOR_TABLES(TABLE, Family) TABLE(Family, Avx512Vnni) TABLE(Family, Avx2)
#else
#define LOWBIT_ISAS(ISA)
#define LOWBIT_LINEAR_TABLES LOWBIT_VECTOR_TABLES
#define LOWBIT_ATTENTION_TABLES LOWBIT_VECTOR_TABLES
#define LOWBIT_VECTOR_TABLES(TABLE, Family)
#endif
