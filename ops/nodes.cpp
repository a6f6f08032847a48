#include "nodes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <sched.h>
#endif

namespace lowbit {
namespace {

constexpr int kMostFolders = 64;  // some nodes may have only memory

// Assigns the CPUs in the file to `node`; returns their number, or -1 if there are too many.
int read_cpus(std::FILE* file, bool (*may_use)(int), uint8_t node, Nodes* nodes) {
  int found = 0, first;
  while (std::fscanf(file, "%d", &first) == 1) {
    int last = first;
    int next = std::fgetc(file);
    if (next == '-') {
      if (std::fscanf(file, "%d", &last) != 1) return -1;
      next = std::fgetc(file);
    }
    if (first < 0 || last >= Nodes::kMostCpus) return -1;
    for (int cpu = first; cpu <= last; ++cpu) {
      if (!may_use(cpu)) continue;
      nodes->of_cpu[cpu] = node;
      ++found;
    }
    if (next != ',') break;
  }
  return found;
}

Nodes one_node() {
  Nodes nodes;
  std::memset(nodes.of_cpu, Nodes::kNone, sizeof nodes.of_cpu);
  return nodes;
}

struct Setting {
  Placement placement = Placement::local;
  Status status;
};

const Setting& setting() {
  static const Setting setting = [] {
    Setting result;
    const char* const name = std::getenv("LOWBIT_NUMA");
    if (name == nullptr || name[0] == '\0' || std::strcmp(name, "local") == 0) return result;
    if (std::strcmp(name, "interleave") == 0) {
      result.placement = Placement::interleave;
    } else if (std::strcmp(name, "off") == 0) {
      result.placement = Placement::off;
    } else {
      result.status = Status::error("LOWBIT_NUMA is '%.32s'; expected local, interleave or off", name);
    }
    return result;
  }();
  return setting;
}

#ifdef __linux__
bool this_process_may_use(int cpu) {
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
    return set;
  }();
  return CPU_ISSET(cpu, &allowed);
}
static_assert(Nodes::kMostCpus <= CPU_SETSIZE);
Nodes read_nodes_of_the_system() { return read_nodes("/sys/devices/system/node", this_process_may_use); }
#else
Nodes read_nodes_of_the_system() { return one_node(); }
#endif

Nodes& current_nodes() {
  static Nodes nodes = read_nodes_of_the_system();
  return nodes;
}

}  // namespace

Nodes read_nodes(const char* directory, bool (*may_use)(int cpu)) {
  Nodes nodes = one_node();
  int count = 0;
  for (int folder = 0; folder < kMostFolders; ++folder) {
    char path[256];
    std::snprintf(path, sizeof path, "%s/node%d/cpulist", directory, folder);
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) continue;  // the numbers of nodes may have gaps
    const int cpus = count < Nodes::kMost ? read_cpus(file, may_use, static_cast<uint8_t>(count), &nodes) : -1;
    std::fclose(file);
    if (cpus < 0) return one_node();
    if (cpus > 0) ++count;
  }
  if (count < 2) return one_node();
  nodes.count = count;
  return nodes;
}

const Nodes& memory_nodes() { return current_nodes(); }
void set_memory_nodes(const Nodes& nodes) { current_nodes() = nodes; }
Placement placement() { return setting().placement; }
const Status& placement_status() { return setting().status; }

int nodes_with_parts() { return placement() == Placement::local ? memory_nodes().count : 1; }

int node_here() {
#ifdef __linux__
  const int cpu = sched_getcpu();
  const uint8_t node = cpu >= 0 && cpu < Nodes::kMostCpus ? memory_nodes().of_cpu[cpu] : Nodes::kNone;
  return node == Nodes::kNone ? 0 : node;
#else
  return 0;
#endif
}

}  // namespace lowbit
