// A vendor's kernel in plain C: symmetric 4-bit linear layers on panel16 weights. docs/format.md shows the bytes,
// lowbit/kernels/ukernel.h the arithmetic, including the order of float operations.

#include <lowbit/kernels/lowbit_ukernel.h>

#include <math.h>
#include <string.h>

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float load_f32(const uint8_t* from, int64_t index) {
  float value;
  memcpy(&value, from + 4 * index, sizeof value);
  return value;
}

// Converts a finite float16, the type of group scales.
static float load_f16(const uint8_t* from, int64_t index) {
  uint16_t half;
  memcpy(&half, from + 2 * index, sizeof half);
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = (float)mantissa / 16777216.0f;  // 2^24: exact
  return sign != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even.
static void store(void* to, uint8_t type, int64_t index, float value) {
  uint32_t bits;
  uint16_t half;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (type == LOWBIT_F32) {
    memcpy((char*)to + 4 * index, &value, sizeof value);
    return;
  }
  if (magnitude > 0x7f800000) {  // NaN
    half = type == LOWBIT_BF16 ? 0x7fc0 : 0x7e00;
  } else if (type == LOWBIT_BF16) {
    half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  } else if (magnitude >= 0x477ff000) {  // 65520 and above
    half = (uint16_t)(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // below 2^-14: the sum has 2^-24 in its last place
    const float shifted = float_of(magnitude) + 0.5f;
    memcpy(&bits, &shifted, sizeof bits);
    half = (uint16_t)(sign | (bits - 0x3f000000));
  } else {
    half = (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
  }
  memcpy((char*)to + 2 * index, &half, sizeof half);
}

// One row of activations times the 16 rows of a panel. Each input of a weight row takes half a byte: of 32 inputs, the first 16
// are in the lower halves of 4 lines of 64 bytes, the others in the upper halves.
static void times_panel(const lowbit_linear_args* args, const uint8_t* panel, int64_t row, float acc[LOWBIT_PANEL_ROWS]) {
  const lowbit_layout* const layout = &args->layout;
  const int64_t group_inputs = lowbit_group_inputs(layout);
  const int8_t* const a = args->a + row * layout->blocks * LOWBIT_BLOCK_INPUTS;
  int64_t segment = row * layout->segments;
  memset(acc, 0, LOWBIT_PANEL_ROWS * sizeof *acc);
  for (int64_t group = 0, i = 0; group < layout->groups; ++group) {
    const int64_t group_end = i + group_inputs < layout->k ? i + group_inputs : layout->k;
    float products[LOWBIT_PANEL_ROWS] = {0};
    for (bool first = true; i < group_end; first = false, ++segment) {
      const int64_t end = i + LOWBIT_SEGMENT_INPUTS < group_end ? i + LOWBIT_SEGMENT_INPUTS : group_end;
      int32_t sums[LOWBIT_PANEL_ROWS] = {0};
      for (; i < end; ++i) {
        const uint8_t* const line =
            panel + lowbit_block_offset(layout, i / LOWBIT_BLOCK_INPUTS) + i / 4 % 4 * LOWBIT_LINE_BYTES + i % 4;
        const int shift = i % LOWBIT_BLOCK_INPUTS < LOWBIT_HALF_INPUTS ? 0 : 4;
        for (int r = 0; r < LOWBIT_PANEL_ROWS; ++r) sums[r] += a[i] * ((line[4 * r] >> shift & 15) - 8);
      }
      const float scale = args->scales[segment];
      for (int r = 0; r < LOWBIT_PANEL_ROWS; ++r) {
        products[r] = first ? scale * (float)sums[r] : fmaf(scale, (float)sums[r], products[r]);
      }
    }
    const uint8_t* const scales = panel + lowbit_scales_offset(layout, group);
    for (int r = 0; r < LOWBIT_PANEL_ROWS; ++r) acc[r] = fmaf(load_f16(scales, r), products[r], acc[r]);
  }
}

static void run(const lowbit_linear_args* args) {
  const lowbit_layout* const layout = &args->layout;
  for (int64_t p = args->panel_begin; p < args->panel_end; ++p) {
    const uint8_t* const panel = args->panels + p * layout->panel_bytes;
    const uint8_t* const head = panel + layout->head_offset;  // row scales, row sums (not used), biases
    const int64_t first = p * LOWBIT_PANEL_ROWS;
    for (int64_t row = 0; row < args->m; ++row) {
      float acc[LOWBIT_PANEL_ROWS];
      times_panel(args, panel, row, acc);
      for (int64_t r = 0; r < LOWBIT_PANEL_ROWS && first + r < layout->n; ++r) {
        const float y = fmaf(load_f32(head, r), acc[r], load_f32(head, 2 * LOWBIT_PANEL_ROWS + r));
        store(args->out, args->out_dtype, row * args->out_stride + first + r, y);
      }
    }
  }
}

// An example of a condition: this kernel takes only calls with one row; the built-in tiles handle the others.
static bool supports(const void* context, const lowbit_layout* layout, int64_t m, lowbit_isa isa) {
  (void)context, (void)layout, (void)isa;
  return m == 1;
}

static const lowbit_linear_kernel rows[] = {{
    .name = "acme_c_linear_a8w4",
    .format = LOWBIT_PANEL16,
    .bits = 4,
    .m_least = 1,
    .n_step = LOWBIT_PANEL_ROWS,
    .run = run,
    .mappings = 1 << LOWBIT_SYMMETRIC,
    .supports = supports,
}};

static const lowbit_library library = {
    .abi = LOWBIT_KERNEL_ABI,
    .sizes = LOWBIT_SIZES,
    .vendor = "acme",
    .preference = LOWBIT_BEFORE_BUILT_IN,  // so that the example runs; leave this out for a slower kernel
    .linear = {rows, sizeof rows / sizeof rows[0]},
};

#ifdef _WIN32
__declspec(dllexport)
#else
__attribute__((visibility("default")))
#endif
const lowbit_library* lowbit_kernels(uint32_t abi);

const lowbit_library* lowbit_kernels(uint32_t abi) { return abi == LOWBIT_KERNEL_ABI ? &library : NULL; }
