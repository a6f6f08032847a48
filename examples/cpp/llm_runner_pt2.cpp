// Generates with a language model in AOTInductor: tokens in, tokens out, no Python. lowbit appears in CMakeLists.txt
// only: the program that links its operator library has its operators.
//
// A .pt2 holds compiled code, which runs as this program does: load only files that you trust as much as a program.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>
#include <unordered_map>

#include "explained.h"
#include "llm.h"
#include "runner.h"

namespace {

// What lowbit.llm.export_decoder wrote beside the program.
class Metadata {
 public:
  Metadata(std::string file, std::unordered_map<std::string, std::string> values)
      : file_(std::move(file)), values_(std::move(values)) {}

  const std::string& text(const std::string& name) const {
    const auto at = values_.find("lowbit.llm." + name);
    if (at == values_.end()) {
      throw std::runtime_error(file_ + " has no 'lowbit.llm." + name + "'; expected what lowbit.llm.export_decoder writes");
    }
    return at->second;
  }

  std::vector<int64_t> numbers(const std::string& name) const { return parse_ids(name + " of " + file_, text(name)); }

  int64_t number(const std::string& name) const {
    return parse_number<int64_t>(name + " of " + file_, text(name), 1, int64_t{1} << 40);
  }

 private:
  std::string file_;
  std::unordered_map<std::string, std::string> values_;
};

void run(int argc, char** argv) {
  const LlmOptions options = parse_llm_options(argc, argv, ".pt2");
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  const c10::InferenceMode no_gradients;  // else every call of an operator looks for its gradient: 1 us
  // The compiled code trusts its inputs, unless it is told to check their types and shapes.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  const auto loader = explained(options.model + " does not load", [&] {
    return std::make_unique<torch::inductor::AOTIModelPackageLoader>(options.model);
  });
  const Metadata metadata(options.model, loader->get_metadata());
  LanguageModel model;
  model.max_length = metadata.number("max_length");
  model.chunk = metadata.number("chunk");
  model.vocabulary = metadata.number("vocabulary");
  model.stop = metadata.numbers("stop");

  at::ScalarType dtype = at::kFloat;
  const std::string& dtype_name = metadata.text("cache_dtype");
  if (dtype_name == "bfloat16") {
    dtype = at::kBFloat16;
  } else if (dtype_name == "float16") {
    dtype = at::kHalf;
  } else if (dtype_name == "int8") {
    dtype = at::kChar;
  } else if (dtype_name != "float32") {
    throw std::runtime_error(options.model + " has caches of type " + dtype_name +
                             "; expected float32, bfloat16, float16 or int8");
  }
  std::vector<at::Tensor> inputs(2);  // tokens and start, then the caches
  explained("the caches cannot be made", [&] {
    const int64_t count = metadata.number("caches");
    const std::vector<int64_t> sizes = metadata.numbers("cache_shape");  // of all of them, or of each
    if (sizes.size() % 4 != 0 || (sizes.size() / 4 != 1 && static_cast<int64_t>(sizes.size() / 4) != count)) {
      throw std::runtime_error(options.model + " has " + std::to_string(sizes.size()) +
                               " sizes of caches; expected 4, or 4 for each of " + std::to_string(count));
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto shape = sizes.begin() + (sizes.size() == 4 ? 0 : 4 * i);
      inputs.push_back(at::zeros(std::vector<int64_t>(shape, shape + 4), dtype));
    }
  });
  model.step = [&](int64_t* tokens, int64_t count, int64_t start, std::vector<float>& logits) {
    inputs[0] = at::from_blob(tokens, {1, count}, at::kLong);
    inputs[1] = at::from_blob(&start, {1}, at::kLong);
    explained("the call failed", [&] {
      const at::Tensor output = loader->run(inputs).at(0).to(at::kFloat).contiguous();
      const float* values = output.const_data_ptr<float>();
      logits.assign(values, values + output.numel());
    });
  };
  generate(model, options);
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("llm_runner_pt2", [&] { run(argc, argv); });
}
