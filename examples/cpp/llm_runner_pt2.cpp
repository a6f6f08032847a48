// Generates with a language model in AOTInductor: tokens in, tokens out, no Python. lowbit appears only in CMakeLists.txt:
// linking its operator library registers the operators.
//
// A .pt2 contains compiled code, which runs with this program's rights. Load only files that you trust as much as a program.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>
#include <sstream>
#include <unordered_map>

#include "explained.h"
#include "llm.h"
#include "runner.h"

namespace {

// Metadata that lowbit.llm.export_decoder stored in the package.
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

// Makes a cache from its description in the metadata, such as float32:1x4x64x16.
at::Tensor zeros(const std::string& file, const std::string& text) {
  const std::unordered_map<std::string, at::ScalarType> types = {
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}, {"int8", at::kChar},
      {"int64", at::kLong}};
  const auto type = types.find(text.substr(0, text.find(':')));
  if (type == types.end() || text.find(':') == std::string::npos) {
    throw std::runtime_error(file + " has a cache '" + text +
                             "'; expected float32, bfloat16, float16, int8 or int64 and a shape, as float32:1x4x64x16");
  }
  std::vector<int64_t> shape;
  std::istringstream sizes(text.substr(text.find(':') + 1));
  for (std::string size; std::getline(sizes, size, 'x');) {
    shape.push_back(parse_number<int64_t>("a size of a cache of " + file, size, 1, int64_t{1} << 40));
  }
  return at::zeros(shape, type->second);
}

void run(int argc, char** argv) {
  const LlmOptions options = parse_llm_options(argc, argv, ".pt2");
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  const c10::InferenceMode no_gradients;  // without it, each call of an operator checks for gradients: 1 us
  // Has the compiled code check the types and shapes of its inputs, which it trusts by default.
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

  std::vector<at::Tensor> inputs(2);  // tokens and start, then the caches
  explained("cannot allocate the caches", [&] {
    std::istringstream caches(metadata.text("caches"));  // float32:1x4x64x16,...
    for (std::string text; std::getline(caches, text, ',');) inputs.push_back(zeros(options.model, text));
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
