// A model in files: a plan and, beside it, the weights that it names. Or in memory: a plan and, after it, its weights. For
// programs without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// How keys and values are stored.
enum class TextCache : uint8_t { f32, bf16, f16, i8, i4 };

class PlanModel;
struct Plan;
struct PlanText;

// A text and its caches.
class LOWBIT_API PlanSession {
 public:
  ~PlanSession();
  PlanSession(const PlanSession&) = delete;
  PlanSession& operator=(const PlanSession&) = delete;

  int64_t length() const;     // tokens that fit
  int64_t position() const;   // tokens that it has
  bool recurrent() const;     // whether it has states, which cannot be cut back
  // Continues the text after its first `count` tokens. Models with states can only go back to 0.
  Status cut(int64_t count);

 private:
  friend class PlanModel;
  struct Implementation;
  explicit PlanSession(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

class LOWBIT_API PlanModel {
 public:
  // Opens a plan's file. The weights are mapped, not copied.
  static Status open(const std::string& file, int threads, std::unique_ptr<PlanModel>* model);
  // Opens a plan with its weights, the bytes of a delegate in a .pte, which need not be trusted. They must stay where they are:
  // weights are not copied.
  static Status open(const void* bytes, size_t size, int threads, std::unique_ptr<PlanModel>* model);
  ~PlanModel();
  PlanModel(const PlanModel&) = delete;
  PlanModel& operator=(const PlanModel&) = delete;

  int64_t vocabulary() const;
  int64_t positions() const;  // the longest text
  const std::vector<int64_t>& stop() const;  // tokens that end a text
  const Plan& plan() const;
  Status begin(int64_t length, TextCache keys, TextCache values, std::unique_ptr<PlanSession>* session) const;
  // The same with the length and the types of caches that the plan names.
  Status begin(std::unique_ptr<PlanSession>* session) const;
  // Adds tokens to a text. logits [vocabulary] are those after the last one. One call at a time.
  Status feed(PlanSession& session, const int64_t* tokens, int64_t count, float* logits);
  // A call with several texts, whose caches are the caller's. Row i is tokens[i], at positions[i] of its text. logits
  // [kept, vocabulary] are those after the rows `keep`. One call at a time.
  Status run(const int64_t* tokens, const int64_t* positions, int64_t rows, const int64_t* keep, int64_t kept,
             const PlanText* texts, int64_t text_count, float* logits);
  // A digest of the logits of a fixed text, its first tokens in one call and its last ones alone, over caches of float32. With
  // the same files it is the same on every machine, for any number of threads.
  Status certify(uint64_t* certificate);

 private:
  struct Implementation;
  explicit PlanModel(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

// FNV-1a of 64 bits, continued from an earlier result: for comparing logits between machines.
inline constexpr uint64_t kEmptyDigest = 0xcbf29ce484222325u;
LOWBIT_API uint64_t digest(const void* bytes, size_t size, uint64_t from = kEmptyDigest);

}  // namespace lowbit
