// A QEMU TCG plugin that counts guest instructions between two markers: hint #97 starts, hint #98 stops, and each stop
// writes one line with the count, markers excluded. For AArch64 guests with one thread. The counts are exact, so they
// repeat from run to run and from machine to machine.
//
//   cc -O2 -shared -fPIC icount.c -o libicount.so
//   qemu-aarch64 -plugin ./libicount.so,out=FILE PROGRAM
//
// QEMU translates a guest's basic blocks. Each block adds its length to `executed` when it is entered, which QEMU
// compiles into the block itself; a marker then knows how much of its own block is still to come.
//
// The declarations below are the part of QEMU's plugin ABI that is used here (version 1; QEMU 4.2 to 9, docs/devel/
// tcg-plugins): distributions do not ship the header with the emulator.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { kInlineAddU64 = 0, kNoRegisters = 0 };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t index);
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

// `rest`: the instructions of the marker's block behind the marker.
static void start(unsigned cpu, void *rest) {
  (void)cpu;
  started_at = executed - (uintptr_t)rest;
}

static void stop(unsigned cpu, void *rest) {
  (void)cpu;
  fprintf(out, "%" PRIu64 "\n", executed - (uintptr_t)rest - 1 - started_at);
  fflush(out);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
  (void)id;
  const size_t count = qemu_plugin_tb_n_insns(block);
  qemu_plugin_register_vcpu_tb_exec_inline(block, kInlineAddU64, &executed, count);
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

// `info`, of no use here, is a structure of QEMU's.
EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
  (void)info;
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "out=", 4) == 0) out = fopen(argv[i] + 4, "w");
  }
  if (out == NULL) {
    fprintf(stderr, "icount: needs out=FILE, a file that can be written\n");
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  return 0;
}
