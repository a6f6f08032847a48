// Nodes of memory (NUMA): a machine's processors reach the memory beside them faster than the others'. Linux only;
// everywhere else a machine is one node.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// The nodes with CPUs that this process may use, numbered from 0. One node: nothing to choose.
struct Nodes {
  static constexpr int kMost = 8, kMostCpus = 1024;
  static constexpr uint8_t kNone = 255;  // a CPU that is not there, or not for this process
  int count = 1;
  uint8_t of_cpu[kMostCpus];
};

// As the system tells of them in `directory`: a folder node<number> for each, whose file cpulist lists its CPUs ("0-3,8").
// More nodes or CPUs than there is room for, or none: one node. `may_use`: whether the process may use a CPU.
LOWBIT_API Nodes read_nodes(const char* directory, bool (*may_use)(int cpu));

// Where copies of weights lie, and which threads compute with them: LOWBIT_NUMA. `local`: each node has a part of every
// matrix, which its threads compute first. `interleave`: pages go round the nodes, and threads take any panel. `off`: nothing
// is done; pages lie where the copying thread runs. The bits of a result are the same.
enum class Placement { local, interleave, off };

// Of this process; read once. set_memory_nodes() has it take others for them, while no operator runs.
LOWBIT_API const Nodes& memory_nodes();
LOWBIT_API void set_memory_nodes(const Nodes& nodes);
LOWBIT_API Placement placement();

// An error when LOWBIT_NUMA is none of the three.
LOWBIT_API const Status& placement_status();

// How many nodes have parts of a matrix: 1 unless the placement is local.
int nodes_with_parts();

// The node of the CPU that runs this, which the system may change at any time.
int node_here();

}  // namespace lowbit
