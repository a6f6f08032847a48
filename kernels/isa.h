// Instruction sets: what this CPU has, what the user allows, and their names.
#pragma once

#include <cstddef>
#include <cstdint>

#include "export.h"
#include "isas.h"
#include "lowbit_ukernel.h"
#include "status.h"

namespace lowbit {

using IsaBits = lowbit_isa;

// One bit per feature set that a kernel can require (lowbit_ukernel.h). A kernel needs all of the bits that it names.
enum Isa : IsaBits {
  kPortable = 0,
#define LOWBIT_BIT(Name, NAME, name) k##Name = LOWBIT_ISA_##NAME,
  LOWBIT_ARM_ISAS(LOWBIT_BIT) LOWBIT_X86_ISAS(LOWBIT_BIT)
#undef LOWBIT_BIT
};

// A name of LOWBIT_ISA. `allows` holds every bit that stays on when the ISA is capped at this name.
struct IsaName {
  const char* name;
  IsaBits bit;
  IsaBits allows;
};

// The names of this processor's family, weakest first; the first is always "portable".
LOWBIT_API const IsaName* isa_names(size_t* count);

// The bits that the CPU and the operating system offer, without any cap. Exception: a process has to request AMX and then keeps
// it, so its bit is set only if LOWBIT_ISA allows it and the system grants it. Read once.
LOWBIT_API IsaBits cpu_isa();

// cpu_isa() reduced by the environment variable LOWBIT_ISA. Read once.
LOWBIT_API IsaBits active_isa();

// How one row or a few rows of activations read their weights: one panel at a time, the same with prefetch far ahead, or
// several panels interleaved (as streams from memory). Results have the same bits; which one is fastest depends on the CPU.
enum class Streams { one, ahead, several };
inline constexpr const char* kStreamsNames[] = {"one", "ahead", "several"};

// The value of LOWBIT_STREAMS (read once), by default the fastest one for the CPU: several on Intel, ahead on AMD from Zen 5
// on. pin_streams() changes it for calls that begin later.
LOWBIT_API Streams streams();
LOWBIT_API void pin_streams(Streams streams);

// Sets *streams to the value with a name. False if there is none.
LOWBIT_API bool streams_named(const char* name, Streams* streams);

// An error if LOWBIT_ISA is not a name of this processor's family (active_isa() is then kPortable), or if LOWBIT_STREAMS is
// not a name. The operators return it.
LOWBIT_API const Status& isa_cap_status();

// The value of LOWBIT_ISA, or nullptr when it was not set or empty. Read once; at most 63 characters.
LOWBIT_API const char* isa_cap();

}  // namespace lowbit
