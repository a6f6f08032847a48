// linear_a8w8_{1,2}x16_avxvnniint8: int8 activations times 8-bit weights by vpdpbssd, which takes both as signed bytes and so
// reads packed bytes unchanged; for one row, directly from memory. Narrower codes, which are nonnegative, and levels would save
// only the start values of their sums, so the kernels for AVX-VNNI handle them.
//
// vpdpbssd is in assembly, because GCC supports it only from version 13 on.

#include "sums_vnni256.h"

namespace lowbit {
namespace {

struct InMemory {
  const __m256i_u* at;
};
struct InRegister {
  __m256i bytes;
};

template <int Bits, bool Affine, int Rows>
struct Products {
  static_assert(stored_flip(Bits) == level_offset(Bits));  // the packed byte is code - offset
  using Codes = std::conditional_t<Rows == 1, InMemory, InRegister>;

  LOWBIT_INLINE void begin(const Layout&) {}

  LOWBIT_INLINE __m256i start(const int32_t* a_sum) const { return Affine ? offset<Bits>(a_sum) : _mm256_setzero_si256(); }

  static constexpr int32_t start_factor(bool affine) { return affine ? level_offset(Bits) : 0; }

  template <int J>
  LOWBIT_INLINE Codes read(const uint8_t* half) const {
    const auto* const at = reinterpret_cast<const __m256i_u*>(half + placement(Bits, J).run[0].line * kLineBytes);
    if constexpr (Rows == 1) return {at};
    else return {_mm256_loadu_si256(at)};
  }

  LOWBIT_INLINE void add(Sums32& sum, Codes codes, __m256i a4) const {
    if constexpr (Rows == 1) {
      __asm__("vpdpbssd %2, %1, %0" : "+x"(sum) : "x"(a4), "m"(*codes.at));
    } else {
      __asm__("vpdpbssd %2, %1, %0" : "+x"(sum) : "x"(a4), "x"(codes.bytes));
    }
  }
};

template <int Bits, bool Affine, bool Halves, int Rows>
using Sums = VnniSums<Products, Bits, Affine, Halves, Rows>;

void run_rows(const LinearArgs& args) { run_many<Sums, 8>(args, run_one<Sums, 8>); }

constexpr LinearKernel kKernels[] = {
    {"linear_a8w8_2x16_avxvnniint8", kAvxVnniInt8, Format::panel16, 8, 2, 16, run_rows},
    {"linear_a8w8_1x16_avxvnniint8", kAvxVnniInt8, Format::panel16, 8, 1, 16, run_one<Sums, 8>}};

}  // namespace

extern const Table<LinearKernel> kLinearAvxVnniInt8;
const Table<LinearKernel> kLinearAvxVnniInt8{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
