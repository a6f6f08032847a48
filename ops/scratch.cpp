#include "scratch.h"

#include <atomic>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define LOWBIT_MARK(memory, bytes, all) __msan_poison(memory, static_cast<size_t>(bytes))
#elif __has_feature(address_sanitizer)
#define LOWBIT_ASAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(LOWBIT_ASAN)
#include <sanitizer/asan_interface.h>
#define LOWBIT_MARK(memory, bytes, all)                           \
  __asan_unpoison_memory_region(memory, static_cast<size_t>(all)); \
  __asan_poison_memory_region(static_cast<char*>(memory) + (bytes), static_cast<size_t>((all) - (bytes)))
#endif

namespace lowbit {
namespace {

constexpr Block kLogarithm = 63;  // the bits of a block's address that store its size
static_assert(kLogarithm < kAlignment);
constexpr int kSmallest = 16, kSlots = 16;

// No lock, because a fork while another thread holds it would deadlock. No thread_local, because C libraries end the process if
// there is no memory to register its destructor.
std::atomic<Block> slots[kSlots];
std::atomic<int64_t> kept{0};

void* address_of(Block block) { return reinterpret_cast<void*>(block & ~kLogarithm); }
int64_t bytes_of(Block block) { return int64_t{1} << (block & kLogarithm); }

// For sanitizers: a call must not read an earlier call's data, or memory beyond its own bytes.
Block marked(Block block, [[maybe_unused]] int64_t bytes) {
#ifdef LOWBIT_MARK
  LOWBIT_MARK(address_of(block), bytes, bytes_of(block));
#endif
  return block;
}

bool take_from(std::atomic<Block>& slot, Block block) {
  if (block == 0 || !slot.compare_exchange_strong(block, 0, std::memory_order_acquire)) return false;
  kept.fetch_sub(bytes_of(block), std::memory_order_relaxed);
  return true;
}

bool put(Block block) {
  const int64_t bytes = bytes_of(block);
  if (kept.fetch_add(bytes, std::memory_order_relaxed) + bytes <= kKeptBytes) {
    for (std::atomic<Block>& slot : slots) {
      Block empty = 0;
      if (slot.load(std::memory_order_relaxed) == 0 && slot.compare_exchange_strong(empty, block, std::memory_order_release)) {
        return true;
      }
    }
  }
  kept.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

// Frees the first kept block; returns false if there is none.
bool release_one() {
  for (std::atomic<Block>& slot : slots) {
    const Block block = slot.load(std::memory_order_relaxed);
    if (take_from(slot, block)) {
      free_aligned(address_of(block));
      return true;
    }
  }
  return false;
}

// Runs when the library is closed.
[[maybe_unused]] const struct AtEnd {
  ~AtEnd() { release_blocks(); }
} at_end;

}  // namespace

Block take_block(int64_t bytes) {
  if (bytes > kKeptBytes) return reinterpret_cast<Block>(allocate_aligned(bytes));
  Block wanted = kSmallest;
  while (int64_t{1} << wanted < bytes) ++wanted;
  for (;;) {  // finds the smallest block that is large enough
    std::atomic<Block>* at = nullptr;
    Block best = 0;
    for (std::atomic<Block>& slot : slots) {
      const Block block = slot.load(std::memory_order_relaxed);
      if ((block & kLogarithm) < wanted || (at != nullptr && (best & kLogarithm) <= (block & kLogarithm))) continue;
      best = block;
      at = &slot;
    }
    if (at == nullptr) break;
    if (take_from(*at, best)) return marked(best, bytes);
  }
  void* const memory = allocate_aligned(int64_t{1} << wanted);
  return memory == nullptr ? 0 : marked(reinterpret_cast<Block>(memory) | wanted, bytes);
}

void give_back(Block block) {
  if ((block & kLogarithm) != 0) {
    for (int i = 0; i <= kSlots; ++i) {  // replaces older blocks, because the latest calls' blocks are the most useful
      if (put(block)) return;
      if (!release_one()) break;
    }
  }
  free_aligned(address_of(block));
}

int64_t kept_bytes() { return kept.load(std::memory_order_relaxed); }

void release_blocks() {
  while (release_one()) {
  }
}

}  // namespace lowbit
