// Memory nodes (NUMA): processors reach their own node's memory faster than other nodes'. Linux only; on other systems a
// machine is one node.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// The nodes with CPUs that this process may use, numbered from 0.
struct Nodes {
  static constexpr int kMost = 8, kMostCpus = 1024;
  static constexpr uint8_t kNone = 255;  // a CPU that does not exist, or is not allowed for this process
  int count = 1;
  uint8_t of_cpu[kMostCpus];
};

// Reads the nodes from `directory`, which has a folder node<number> for each, with its CPUs in the file cpulist ("0-3,8"). Too
// many nodes or CPUs, or none, count as one node. `may_use`: whether the process may use a CPU.
LOWBIT_API Nodes read_nodes(const char* directory, bool (*may_use)(int cpu));

// Placement of copied weights, and of the threads that compute with them: LOWBIT_NUMA. `local`: each node has a part of every
// matrix, which its threads compute first. `interleave`: pages alternate between nodes, and threads take any panel. `off`:
// pages are on the node of the copying thread. Results have the same bits.
enum class Placement { local, interleave, off };

// The nodes of this process, read once. set_memory_nodes() replaces them, while no operator runs.
LOWBIT_API const Nodes& memory_nodes();
LOWBIT_API void set_memory_nodes(const Nodes& nodes);
LOWBIT_API Placement placement();

// An error if LOWBIT_NUMA has another value.
LOWBIT_API const Status& placement_status();

// Number of nodes with parts of a matrix: 1 unless the placement is local.
int nodes_with_parts();

// The node of the current CPU, which the system may change at any time.
int node_here();

}  // namespace lowbit
