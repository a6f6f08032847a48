// Generates with a language model by its plan: tokens in, tokens out, with no library but lowbit's.

#include <lowbit/plan/cores.h>
#include <lowbit/plan/model.h>

#include <memory>

#include "llm.h"
#include "runner.h"

namespace {

void run(int argc, char** argv) {
  const LlmOptions options = parse_llm_options(argc, argv, ".plan");
  const int64_t threads = options.threads > 0 ? options.threads : lowbit::default_threads();
  std::unique_ptr<lowbit::PlanModel> plan;
  check(lowbit::PlanModel::open(options.model, static_cast<int>(threads), &plan));
  if (options.certify) {
    uint64_t certificate = 0;
    check(plan->certify(&certificate));
    std::printf("%016llx\n", static_cast<unsigned long long>(certificate));
    return;
  }
  LanguageModel model;
  model.max_length = options.max_length > 0 ? options.max_length : std::min<int64_t>(plan->positions(), 2048);
  model.chunk = model.max_length;
  model.vocabulary = plan->vocabulary();
  model.stop = plan->stop();
  std::unique_ptr<lowbit::PlanSession> text;
  lowbit::TextCache keys = lowbit::TextCache::f32, values = keys;
  if (!options.cache.empty()) {
    const size_t comma = options.cache.find(',');
    if (!lowbit::cache_named(options.cache.substr(0, comma), &keys) ||
        !lowbit::cache_named(options.cache.substr(comma == std::string::npos ? 0 : comma + 1), &values)) {
      throw std::runtime_error("--cache is '" + options.cache + "'; expected a type, or two as int8,int4");
    }
  }
  check(plan->begin(model.max_length, keys, values, &text));
  if (!options.load.empty()) check(text->load(options.load));
  model.loaded = text->position();
  model.step = [&](int64_t* tokens, int64_t count, int64_t, std::vector<float>& logits) {
    logits.resize(static_cast<size_t>(model.vocabulary));
    check(plan->feed(*text, tokens, count, logits.data()));
  };
  generate(model, options);
  if (!options.save.empty()) check(text->save(options.save));
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("llm_runner_plan", [&] { run(argc, argv); });
}
