#include "sme_threads.h"

#include <cstdio>
#include <cstdlib>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lowbit {

#if defined(__linux__)
int clusters_in(const char* directory) {
  constexpr int kMost = 64;
  int cluster_ids[kMost], clusters = 0;
  for (int cpu = 0; cpu < 1024; ++cpu) {
    char path[256];
    std::snprintf(path, sizeof path, "%.200s/cpu%d/topology/cluster_id", directory, cpu);
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) continue;  // offline CPUs have no such file
    int id = -1;
    if (std::fscanf(file, "%d", &id) != 1) id = -1;
    std::fclose(file);
    int i = 0;
    while (i < clusters && cluster_ids[i] != id) ++i;
    if (id >= 0 && i == clusters && clusters < kMost) cluster_ids[clusters++] = id;
  }
  return clusters;
}
#endif

namespace {

#if defined(__APPLE__)
// Cores of one kind that share a second-level cache form a cluster.
int count_clusters() {
  const auto number = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
  };
  int clusters = 0;
  for (int level = 0; level < number("hw.nperflevels"); ++level) {
    char cores[64], shared[64];
    std::snprintf(cores, sizeof cores, "hw.perflevel%d.physicalcpu", level);
    std::snprintf(shared, sizeof shared, "hw.perflevel%d.cpusperl2", level);
    if (number(shared) > 0) clusters += (number(cores) + number(shared) - 1) / number(shared);
  }
  return clusters;
}
#elif defined(__linux__) && defined(__aarch64__)
int count_clusters() { return clusters_in("/sys/devices/system/cpu"); }
#else
int count_clusters() { return 1; }
#endif

struct Limit {
  int threads = 1;
  Status status;
};

const Limit& limit() {
  static const Limit limit = [] {
    Limit result;
    const char* const text = std::getenv("LOWBIT_SME_THREADS");
    if (text == nullptr || text[0] == '\0') {
      const int clusters = count_clusters();
      result.threads = clusters > 1 ? clusters : 1;
      return result;
    }
    char* end;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || text[0] < '0' || text[0] > '9' || value > 1024) {
      result.status = Status::error("LOWBIT_SME_THREADS is '%.32s'; expected a number from 0 to 1024", text);
    } else {
      result.threads = static_cast<int>(value);
    }
    return result;
  }();
  return limit;
}

}  // namespace

int sme_threads() { return limit().threads; }

const Status& sme_threads_status() { return limit().status; }

}  // namespace lowbit
