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
#include "threads.h"

namespace lowbit {

// How keys and values are stored.
enum class TextCache : uint8_t { f32, bf16, f16, i8, i4 };
// float32, bfloat16, float16, int8 or int4; false for another name.
LOWBIT_API bool cache_named(const std::string& name, TextCache* type);

class PlanModel;
struct Plan;
struct PlanCall;

// A text and its caches.
class LOWBIT_API PlanSession {
 public:
  ~PlanSession();
  PlanSession(const PlanSession&) = delete;
  PlanSession& operator=(const PlanSession&) = delete;

  int64_t length() const;     // tokens that fit
  int64_t position() const;   // tokens that it has
  bool recurrent() const;     // whether it has states, which cannot be cut back
  const std::vector<int64_t>& tokens() const;
  // Continues the text after its first `count` tokens. Models with states can only go back to 0.
  Status cut(int64_t count);
  // Writes the text to a file, with the caches of its tokens. The file is replaced when all is written.
  Status save(const std::string& file) const;
  // Replaces the text by one that was saved with the same plan and types of caches. The file need not be trusted. After an
  // error the text is as before.
  Status load(const std::string& file);

 private:
  friend class PlanModel;
  struct Implementation;
  explicit PlanSession(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

class LOWBIT_API PlanModel {
 public:
  // Opens a plan's file, or lowbit.plan in a directory. The weights are mapped, not copied.
  static Status open(const std::string& file, const Threads& threads, std::unique_ptr<PlanModel>* model);
  // Opens a plan with its weights, the bytes of a delegate in a .pte, which need not be trusted. They must stay where they are:
  // weights are not copied.
  static Status open(const void* bytes, size_t size, const Threads& threads, std::unique_ptr<PlanModel>* model);
  ~PlanModel();
  PlanModel(const PlanModel&) = delete;
  PlanModel& operator=(const PlanModel&) = delete;

  int64_t vocabulary() const;
  int64_t positions() const;  // the longest text
  const std::vector<int64_t>& stop() const;  // tokens that end a text
  const Plan& plan() const;
  Status begin(int64_t length, TextCache keys, TextCache values, std::unique_ptr<PlanSession>* session) const;
  // The length and the types of caches that the plan of a delegate names.
  int64_t default_length() const;
  Status cache_types(TextCache* keys, TextCache* values) const;
  // Adds tokens to a text. logits [vocabulary] are those after the last one. One call at a time.
  Status feed(PlanSession& session, const int64_t* tokens, int64_t count, float* logits);
  // Embeddings or scores of texts by the plan of an encoder. `ids` has the tokens of all texts, `lengths` how many each text
  // has, `types` the kind of each token, or is null: all are 0. Writes [texts, width] to `vectors`. One call at a time.
  int64_t width() const;  // numbers of each text; 0: not an encoder's plan
  Status embed(const int64_t* ids, const int64_t* types, const int64_t* lengths, int64_t texts, float* vectors);
  // Runs a plan with inputs, outputs and caches of the caller.
  Status run(const PlanCall& call);
  size_t cache_count() const;  // tensors of each text of such a call
  // From now on, calls add the seconds of each operator: measured()[opcode]. Only between calls.
  void measure();
  const std::vector<double>& measured() const;
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
