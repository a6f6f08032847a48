// Runs an AOTInductor package (.pt2) with libtorch, without Python. CMakeLists.txt links lowbit's operator library, which
// registers the operators: no code here is about lowbit.
//
// A .pt2 contains compiled code, which runs with this program's rights. Load only files that you trust as much as a program.

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>

#include "explained.h"
#include "runner.h"

namespace {

void run(int argc, char** argv) {
  const Options options = parse_options(argc, argv, ".pt2");
  std::vector<Array> arrays;
  for (const std::string& path : options.inputs) arrays.push_back(read_npy(path));

  const c10::InferenceMode no_gradients;  // without it, each call of an operator checks for gradients: 1 us
  // Has the compiled code check the types and shapes of its inputs, which it trusts by default.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  const auto loader = explained(options.model + " does not load", [&] {
    return std::make_unique<torch::inductor::AOTIModelPackageLoader>(options.model);
  });
  std::vector<at::Tensor> inputs;
  for (Array& array : arrays) {
    inputs.push_back(at::from_blob(array.data.data(), array.shape, static_cast<at::ScalarType>(array.type->number)));
  }
  const auto call = [&] { return explained("the call failed", [&] { return loader->run(inputs); }); };
  const std::vector<at::Tensor> outputs = call();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor output = outputs[i].contiguous();
    show(options, i, type_of_number(static_cast<int>(output.scalar_type())), output.sizes().vec(),
         output.const_data_ptr());
  }
  time_calls(options.runs, call);
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("pt2_runner", [&] { run(argc, argv); });
}
