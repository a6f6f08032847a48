// A QEMU TCG plugin that counts guest instructions between two markers: hint #97 starts, hint #98 stops, and each stop
// writes one line with the count, without the markers. For AArch64 guests with one thread. The counts are exact, so they
// repeat from run to run and from machine to machine.
//
//   cc -O2 -shared -fPIC icount.c -o libicount.so
//   qemu-aarch64 -plugin ./libicount.so,out=FILE[,blocks=on] PROGRAM
//
// QEMU translates a guest's basic blocks. Each block adds its length to `executed` when it is entered, which QEMU
// compiles into the block itself; a marker then knows how much of its own block is still to come.
//
// blocks=on also writes the executed blocks, for a model of the cycles. Before the first call that needs it, each block has a
// line with its instructions:
//   block ID ADDRESS WORD...               (hexadecimal)
// After each count come the blocks and how often each was entered: COUNT ID*TIMES... Only the last block, with the stop marker,
// was not executed to its end.
//
// The declarations below are the part of QEMU's plugin ABI that is used here (version 1; QEMU 4.2 to 9, docs/devel/
// tcg-plugins): distributions do not ship the header with the emulator.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { kInlineAddU64 = 0, kNoRegisters = 0 };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t index);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *block);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *instruction);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*translated)(qemu_plugin_id_t id,
                                                                                   struct qemu_plugin_tb *block));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation, void *counter,
                                              uint64_t value);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *instruction,
                                            void (*executed)(unsigned cpu, void *data), int registers, void *data);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

static uint64_t executed;    // instructions of all blocks entered so far
static uint64_t started_at;  // instructions executed up to and including the start marker
static FILE *out;

struct block {
  struct block *next;
  uint64_t address, entered;
  size_t id, count;
  int shown;
  uint32_t words[];
};
static int with_blocks;
static struct block *blocks;  // all that were ever translated, the newest first

// `rest`: the number of instructions after the marker in its block.
static void start(unsigned cpu, void *rest) {
  (void)cpu;
  started_at = executed - (uintptr_t)rest;
  for (struct block *block = blocks; block != NULL; block = block->next) block->entered = 0;
}

static void show_blocks(void) {
  for (struct block *block = blocks; block != NULL; block = block->next) {
    if (block->entered == 0 || block->shown) continue;
    block->shown = 1;
    fprintf(out, "block %zu %" PRIx64, block->id, block->address);
    for (size_t i = 0; i < block->count; ++i) fprintf(out, " %08" PRIx32, block->words[i]);
    fprintf(out, "\n");
  }
}

static void stop(unsigned cpu, void *rest) {
  (void)cpu;
  show_blocks();
  fprintf(out, "%" PRIu64, executed - (uintptr_t)rest - 1 - started_at);
  for (struct block *block = blocks; block != NULL; block = block->next) {
    if (block->entered != 0) fprintf(out, " %zu*%" PRIu64, block->id, block->entered);
  }
  fprintf(out, "\n");
  fflush(out);
}

// QEMU may translate the same instructions again into another block, so readers of the file must identify blocks by address.
static void remember(struct qemu_plugin_tb *translation, size_t count) {
  struct block *block = calloc(1, sizeof *block + count * sizeof *block->words);
  if (block == NULL) abort();
  block->next = blocks;
  block->id = blocks == NULL ? 0 : blocks->id + 1;
  block->address = qemu_plugin_tb_vaddr(translation);
  block->count = count;
  for (size_t i = 0; i < count; ++i) {
    memcpy(&block->words[i], qemu_plugin_insn_data(qemu_plugin_tb_get_insn(translation, i)), sizeof *block->words);
  }
  blocks = block;
  qemu_plugin_register_vcpu_tb_exec_inline(translation, kInlineAddU64, &block->entered, 1);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  (void)id;
  const size_t count = qemu_plugin_tb_n_insns(block);
  qemu_plugin_register_vcpu_tb_exec_inline(block, kInlineAddU64, &executed, count);
  if (with_blocks) remember(block, count);
  for (size_t i = 0; i < count; ++i) {
    struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
    uint32_t word;
    memcpy(&word, qemu_plugin_insn_data(instruction), sizeof word);
    if ((word & 0xfffff01fu) != 0xd503201fu) continue;  // no hint
    const unsigned hint = word >> 5 & 127;
    if (hint != 97 && hint != 98) continue;
    qemu_plugin_register_vcpu_insn_exec_cb(instruction, hint == 97 ? start : stop, kNoRegisters,
                                           (void *)(uintptr_t)(count - 1 - i));
  }
}

// `info` is a structure of QEMU's, which is not used here.
EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
  (void)info;
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "out=", 4) == 0) out = fopen(argv[i] + 4, "w");
    if (strcmp(argv[i], "blocks=on") == 0) with_blocks = 1;
  }
  if (out == NULL) {
    fprintf(stderr, "icount: needs out=FILE, a file that can be written\n");
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  return 0;
}
