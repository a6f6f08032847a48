// Runs a package of AOTInductor with libtorch: no Python. lowbit appears in CMakeLists.txt only: the program that links
// its operator library has its operators.
//
// A .pt2 holds compiled code, which runs as this program does: load only files that you trust as much as a program.

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

  const c10::InferenceMode no_gradients;  // else every call of an operator looks for its gradient: 1 us
  // The compiled code trusts its inputs, unless it is told to check their types and shapes.
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
