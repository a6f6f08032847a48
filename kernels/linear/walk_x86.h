// How x86 kernels walk a panel: one block after the other, each group from its first to its last input.
#pragma once

#include <xmmintrin.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../group_parts.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

// What a tile of several rows prefetches while it multiplies. Its panel comes from memory, which takes about as long as the
// products of a few rows: without prefetch, one waits for the other. A call's only tile prefetches its own panel, `ahead` bytes
// ahead. Several tiles share the work: each prefetches its part of the next panel. With two tiles each part is half a panel,
// which goes to the second-level cache, so that the activations stay in the first.
// A part is prefetched in equal steps, one before each block. Steps need not begin at a cache line, and none exceeds its part.
class Prefetch {
 public:
  static constexpr int64_t kAhead = 4 << 10;

  Prefetch(const Layout& layout, const uint8_t* panel, bool is_last, int64_t number, int64_t tiles, int64_t ahead = kAhead) {
    const int64_t bytes = layout.panel_bytes / tiles;
    const bool is_only = tiles == 1;
    step_ = bytes / layout.blocks + 1;
    second_level_ = tiles == 2;
    next_ = is_only ? panel + ahead : panel + layout.panel_bytes + number * bytes;
    end_ = is_last ? panel + layout.panel_bytes : next_ + bytes;
  }

  // Called before each block.
  LOWBIT_INLINE void operator()() {
    __asm__("" : "+r"(next_));  // otherwise GCC 12 duplicates each loop, with and without prefetch
    if (next_ >= end_) return;
    const uint8_t* const next = next_ + step_;
    for (const uint8_t* line = next_; line < next; line += kLineBytes) {
      if (second_level_) {
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
      } else {
        _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
      }
    }
    next_ = next;
  }

 private:
  const uint8_t *next_, *end_;
  int64_t step_;
  bool second_level_;
};

// The same for tiles that read unpacked panels: each prefetches its part of the next packed panels to the second-level cache.
class PrefetchNext {
 public:
  PrefetchNext(const Layout& layout, const uint8_t* panels, int64_t all_bytes, int64_t number, int64_t tiles) {
    const int64_t bytes = all_bytes / tiles;
    step_ = bytes / layout.blocks + 1;
    next_ = panels + number * bytes;
    end_ = next_ + bytes;
  }

  // Called before each block.
  LOWBIT_INLINE void operator()() {
    __asm__("" : "+r"(next_));  // otherwise GCC 12 duplicates each loop, with and without prefetch
    if (next_ >= end_) return;
    const uint8_t* const next = next_ + step_;
    for (const uint8_t* line = next_; line < next; line += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T1);
    }
    next_ = next;
  }

 private:
  const uint8_t *next_, *end_;
  int64_t step_;
};

// Where groups end: after their only segment, of one or two whole blocks; after several segments of whole blocks; in the middle
// and at the end of each block (groups of 16); or anywhere else, also in the middle of a block.
enum class Groups { one_segment, segments, halves, anywhere };

// A kernel provides for one tile:
//   kBlockBytes, group_bytes() of the panel
//   kLoops                     several rows: whether one copy of a block's code serves both blocks of a segment
//   kPanels                    one row of m: how many panels it interleaves; several rows: 0
//   start(segment)             clears the integer sums
//   begin_block(at)            sets the packed lines for the next calls of add()
//   add<First, Lines>(a)       adds the products of some of its eight lines; a: the first row's activations of the block
//   finish_only(group, scales)   acc = fma(scale, t * I, acc): a group of one segment
//   has_mins(), add_mins(group, scales)   called after finish() and finish_only(): acc = fma(min, group sum, acc)
// and for longer groups
//   begin_group()              P = 0
//   end_segment(segment)       P = fma(t, I, P), which for the first segment is t * I
//   finish(group, scales)      acc = fma(scale, P, acc)
// and ahead(), called before each block. Segments and groups come in order. Groups of one segment have a separate walk, because
// no products are kept in registers between segments. For one row, for which the work per group is short, the number of blocks
// of a group is a constant in that walk.
template <Groups Kind, class Tile, class Ahead>
LOWBIT_INLINE inline void walk(const Layout& layout, const uint8_t* at, const int8_t* a, Tile& tile, Ahead ahead) {
  const int64_t groups = layout.groups;
  const auto add_mins = [&](int64_t group, const uint8_t* scales) LOWBIT_INLINE {
    if (tile.has_mins()) tile.add_mins(group, scales);
  };
  if constexpr (Kind == Groups::halves) {
    constexpr int kHalfLines = kBlockLines / 2;
    int64_t group = 0;
    const auto end_group = [&]() LOWBIT_INLINE {
      tile.finish_only(group, at);
      add_mins(group, at);
      at += tile.group_bytes();
      return ++group == groups;
    };
    while (true) {
      ahead();
      tile.start(group);
      tile.begin_block(at);
      at += Tile::kBlockBytes;
      tile.template add<0, kHalfLines>(a);
      if (end_group()) return;  // k ends in the first half of the last block
      tile.start(group);
      tile.template add<kHalfLines, kHalfLines>(a);
      if (end_group()) return;
      a += kBlockInputs;
      if constexpr (Tile::kPanels != 1) __asm__("" : "+r"(at), "+r"(a));
    }
  } else if constexpr (Kind != Groups::anywhere) {
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    int64_t remaining = layout.blocks, group = 0, segment = 0;
    const auto add_block = [&]() LOWBIT_INLINE {
      ahead();
      tile.begin_block(at);
      tile.template add<0, kBlockLines>(a);
      at += Tile::kBlockBytes;
      a += kBlockInputs;
      if constexpr (Tile::kPanels != 1) __asm__("" : "+r"(at), "+r"(a));  // these are the only pointers in the loop
    };
    constexpr int64_t kSegmentBlocks = kSegmentInputs / kBlockInputs;
    static_assert(kSegmentBlocks == 2);
    if constexpr (Kind == Groups::one_segment && Tile::kPanels > 0) {
      const auto add_group = [&](auto blocks) LOWBIT_INLINE {
        tile.start(group);
        for (int i = 0; i < blocks(); ++i) add_block();
        tile.finish_only(group, at);
        add_mins(group++, at);
        at += tile.group_bytes();
      };
      if (group_blocks == kSegmentBlocks) {
        const int64_t whole = remaining / kSegmentBlocks;
        while (group < whole) add_group(std::integral_constant<int, 2>());
      }
      while (group < groups) add_group(std::integral_constant<int, 1>());
      return;
    }
    for (; group < groups; ++group, at += tile.group_bytes()) {
      int64_t count = remaining < group_blocks ? remaining : group_blocks;
      remaining -= count;
      if constexpr (Kind == Groups::one_segment) {
        tile.start(group);
        for (; count > 0; --count) add_block();
        tile.finish_only(group, at);
      } else if constexpr (Tile::kPanels == 0) {
        tile.begin_group();
        do {
          tile.start(segment);
          if constexpr (Tile::kLoops) {
            int64_t left = count < kSegmentBlocks ? count : kSegmentBlocks;
            do {
              add_block();
              __asm__("" : "+r"(--left));  // otherwise GCC 12 unrolls the loop
            } while (left > 0);
          } else {
            add_block();
            if (count > 1) add_block();
          }
          tile.end_segment(segment++);
          count -= kSegmentBlocks;
          __asm__("" : "+r"(count));  // otherwise GCC 12 duplicates the loop's body
        } while (count > 0);
        tile.finish(group, at);
      } else {
        tile.begin_group();
        for (; count >= kSegmentBlocks; count -= kSegmentBlocks) {
          tile.start(segment);
          add_block();
          add_block();
          tile.end_segment(segment++);
          // Otherwise GCC 12 recomputes the addresses after the loop for every group.
          __asm__("" : "+r"(at), "+r"(a), "+r"(segment), "+r"(count));
        }
        if (count > 0) {
          tile.start(segment);
          add_block();
          tile.end_segment(segment++);
        }
        tile.finish(group, at);
      }
      add_mins(group, at);
    }
  } else {
    constexpr int kHalfLines = kBlockLines / 2;
    for (const GroupPart part : GroupParts(layout)) {
      if (part.first) tile.begin_group();
      tile.start(part.index);
      for (int64_t half = part.begin; half < part.end; ++half) {
        if (half % 2 == 0) {
          ahead();
          tile.begin_block(at);
          at += Tile::kBlockBytes;
          tile.template add<0, kHalfLines>(a);
        } else {
          tile.template add<kHalfLines, kHalfLines>(a);
          a += kBlockInputs;
        }
      }
      tile.end_segment(part.index);
      if (!part.last) continue;
      tile.finish(part.group, at);
      add_mins(part.group, at);
      at += tile.group_bytes();
    }
  }
}

// Walks without prefetch.
template <Groups Kind, class Tile>
LOWBIT_INLINE inline void walk(const Layout& layout, const uint8_t* at, const int8_t* a, Tile& tile) {
  walk<Kind>(layout, at, a, tile, []() LOWBIT_INLINE {});
}

// Walks tile `number` of `tiles` over one of a call's panels. `Ahead`: with Prefetch, `ahead` bytes ahead.
template <Groups Kind, bool Ahead, class Tile>
LOWBIT_INLINE inline void walk_panel(const LinearArgs& args, int64_t panel, const int8_t* a, Tile& tile,
                                     int64_t number, int64_t tiles, int64_t ahead) {
  const Layout& layout = args.layout;
  const uint8_t* const at = args.panels + panel * layout.panel_bytes;
  if constexpr (Ahead) {
    walk<Kind>(layout, at, a, tile, Prefetch(layout, at, panel + 1 == args.panel_end, number, tiles, ahead));
  } else {
    walk<Kind>(layout, at, a, tile);
  }
}

// For walk(): a tile on each of `Panels` adjacent panels, one block of each in turn. Memory is read in `Panels` streams, each
// prefetched `Ahead` bytes before its use.
template <class Tile, int Panels, int64_t Ahead>
struct Interleaved {
  static constexpr int64_t kBlockBytes = Tile::kBlockBytes;
  static constexpr int kPanels = Panels;

  Tile panel[Panels];
  int64_t panel_bytes;
  const uint8_t* block;  // the block of the first panel

  LOWBIT_INLINE int64_t group_bytes() const { return panel[0].group_bytes(); }
  LOWBIT_INLINE bool has_mins() const { return panel[0].has_mins(); }

  LOWBIT_INLINE void start(int64_t segment) {
    for_each_tile([&](Tile& tile) LOWBIT_INLINE { tile.start(segment); });
  }

  LOWBIT_INLINE void begin_block(const uint8_t* at) { block = at; }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const int8_t* a) {
    for_each_panel(block, [&](Tile& tile, const uint8_t* at) LOWBIT_INLINE {
      if constexpr (First == 0) {
        for (int64_t line = 0; line < kBlockBytes; line += kLineBytes) prefetch(at + line);
      }
      tile.begin_block(at);
      tile.template add<First, Lines>(a);
    });
  }

  LOWBIT_INLINE void begin_group() {
    for_each_tile([&](Tile& tile) LOWBIT_INLINE { tile.begin_group(); });
  }

  LOWBIT_INLINE void end_segment(int64_t segment) {
    for_each_tile([&](Tile& tile) LOWBIT_INLINE { tile.end_segment(segment); });
  }

  LOWBIT_INLINE void finish(int64_t group, const uint8_t* scales) {
    for_each_panel(scales, [&](Tile& tile, const uint8_t* at) LOWBIT_INLINE {
      prefetch(at);  // a block and its scales touch one more line than the block
      tile.finish(group, at);
    });
  }

  LOWBIT_INLINE void finish_only(int64_t group, const uint8_t* scales) {
    for_each_panel(scales, [&](Tile& tile, const uint8_t* at) LOWBIT_INLINE {
      prefetch(at);
      tile.finish_only(group, at);
    });
  }

  LOWBIT_INLINE void add_mins(int64_t group, const uint8_t* scales) {
    for_each_panel(scales, [&](Tile& tile, const uint8_t* at) LOWBIT_INLINE { tile.add_mins(group, at); });
  }

  // Calls body(tile) without a loop, which would leave the sums in memory.
  template <class Body>
  LOWBIT_INLINE void for_each_tile(Body body) {
    [&]<int... P>(std::integer_sequence<int, P...>) LOWBIT_INLINE {
      (body(panel[P]), ...);
    }(std::make_integer_sequence<int, Panels>());
  }

  // Calls body(tile, pointer), with `at` for the first panel. One pointer serves two panels. Its origin is hidden from the
  // compiler, which would otherwise keep more addresses than there are registers.
  template <class Body>
  LOWBIT_INLINE void for_each_panel(const uint8_t* at, Body body) {
    int64_t bytes = panel_bytes;
    __asm__("" : "+r"(bytes));
    [&]<int... P>(std::integer_sequence<int, P...>) LOWBIT_INLINE {
      ((P > 0 && P % 2 == 0 ? advance(at, 2 * bytes) : void(), body(panel[P], P % 2 == 0 ? at : at + bytes)), ...);
    }(std::make_integer_sequence<int, Panels>());
  }

 private:
  LOWBIT_INLINE static void advance(const uint8_t*& at, int64_t bytes) {
    at += bytes;
    __asm__("" : "+r"(at));
  }

  // Past the last panel too: a prefetch does not fault.
  LOWBIT_INLINE static void prefetch(const uint8_t* at) {
    _mm_prefetch(reinterpret_cast<const char*>(at) + Ahead, _MM_HINT_T0);
  }
};

}  // namespace
}  // namespace lowbit
