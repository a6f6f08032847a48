// Threads that stay awake during a call of a plan, so that its operators begin within a microsecond, and sleep between calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../kernels/export.h"
#include "../ops/first_weights.h"
#include "../ops/parallel.h"
#include "../ops/schedule.h"
#include "threads.h"

namespace lowbit {

class LOWBIT_API Team {
 public:
  // The count includes the caller's thread. Throws std::system_error if the system starts no more threads.
  explicit Team(const Threads& threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_.count; }

  // Keeps the helpers awake while it exists. Only one thread at a time may have one of a team's.
  class LOWBIT_API Awake {
   public:
    explicit Awake(Team& team);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
    // For operators that are called by the thread that made this object.
    Parallel parallel() const;
    // The weights that each helper reads in a later job. From the next job on, helpers without work prefetch them.
    void prefetch(const FirstWeights* of_helpers) const { team_.next_ = of_helpers; }

   private:
    Team& team_;
    Team* const earlier_;
  };

 private:
  // A helper's first weights.
  struct alignas(kCacheLine) Soon {
    std::atomic<const uint8_t*> begin{nullptr};
    std::atomic<int64_t> bytes{0}, panels{0};

    bool prefetch(const uint8_t** begun, int64_t* done) const;  // false if there is nothing to do
  };

  void help(const Soon& soon);
  void stop();
  bool claim_and_run();
  void run(int count, void (*task)(void* context, int index), void* context);

  // The job's number, its number of tasks and the next task to claim, in one word, so that a claim cannot mix two jobs.
  alignas(kCacheLine) std::atomic<uint64_t> ticket_{0};
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(kCacheLine) std::atomic<int> done_{0};
  enum State : uint32_t { asleep, awake, ended };
  alignas(kCacheLine) std::atomic<uint32_t> state_{asleep};
  std::vector<Soon> soon_;  // one for each helper
  const FirstWeights* next_ = nullptr;
  const int64_t process_;
  const Threads threads_;
  std::vector<std::thread> helpers_;
};

}  // namespace lowbit
