#include "cores.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lowbit {
namespace {

constexpr int kMostThreads = 1024;

// A file's first line; empty if there is none.
std::string first_line(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return {};
  char line[256];
  const bool read = std::fgets(line, sizeof line, file) != nullptr;
  std::fclose(file);
  return read ? line : std::string();
}

int64_t number_in(const std::string& path) {
  long long value = 0;
  return std::sscanf(first_line(path).c_str(), "%lld", &value) == 1 ? value : 0;
}

#ifdef __linux__
std::vector<int> usable_cpus() {
  std::vector<int> cpus;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}
#endif

// The system's own count; 0 if it has none.
int count_of_system() {
#if defined(__linux__)
  return count_fast_cores("/sys/devices/system/cpu", usable_cpus());
#elif defined(__APPLE__)
  int count = 0;
  size_t size = sizeof count;
  return sysctlbyname("hw.perflevel0.physicalcpu", &count, &size, nullptr, 0) == 0 ? count : 0;
#else
  return 0;
#endif
}

}  // namespace

int count_fast_cores(const char* directory, const std::vector<int>& cpus) {
  struct Core {
    int64_t capacity, frequency;
  };
  std::vector<Core> cores;
  std::set<std::string> known;
  Core most{0, 0};
  for (const int cpu : cpus) {
    const std::string at = directory + ("/cpu" + std::to_string(cpu));
    std::string name = first_line(at + "/topology/thread_siblings_list");
    if (name.empty()) name = std::to_string(cpu);
    if (!known.insert(name).second) continue;
    const Core core{number_in(at + "/cpu_capacity"), number_in(at + "/cpufreq/cpuinfo_max_freq")};
    most = {std::max(most.capacity, core.capacity), std::max(most.frequency, core.frequency)};
    cores.push_back(core);
  }
  // Clusters of medium cores have about .7 to .9 of the largest capacity, and small cores less than half. If the system does
  // not report capacities, the highest frequency is used, which differs by up to a tenth between equal cores.
  return static_cast<int>(std::count_if(cores.begin(), cores.end(), [&](const Core& core) {
    return most.capacity > 0 ? 3 * core.capacity >= 2 * most.capacity : 6 * core.frequency >= 5 * most.frequency;
  }));
}

int default_threads() {
  const int counted = count_of_system();
  return std::clamp(counted > 0 ? counted : static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

}  // namespace lowbit
