// Compile sources that use AMX through GCC's intrinsics with `-include` of this header. GCC 12's intrinsics do not declare
// which memory they read, so the compiler removes stores to a tile configuration or a tile that nothing else reads. `ldtilecfg`
// then reads tiles without rows, or old bytes of the stack, and the process ends by a signal (docs/measurements/design.md,
// "llama.cpp on AMX under emulation").
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) LOWBIT_TILE_LOAD("tileloadd", tile, base, stride)
#undef _tile_stream_loadd
#define _tile_stream_loadd(tile, base, stride) LOWBIT_TILE_LOAD("tileloaddt1", tile, base, stride)
// Two levels, so that a macro can name a tile.
#define LOWBIT_TILE_LOAD(instruction, tile, base, stride) LOWBIT_TILE_LOAD_(instruction, tile, base, stride)
#define LOWBIT_TILE_LOAD_(instruction, tile, base, stride) \
  __asm__ volatile(instruction " (%0,%1,1), %%tmm" #tile : : "r"((const void*)(base)), "r"((long)(stride)) : "memory")
#endif
