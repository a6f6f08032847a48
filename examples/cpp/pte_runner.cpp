// Runs an ExecuTorch program: no Python, no PyTorch. lowbit appears only in CMakeLists.txt: linking its operator library
// registers the operators.

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr_maker.h>

#include "runner.h"

namespace {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using executorch::runtime::Program;
using executorch::runtime::Tag;

constexpr char kMethod[] = "forward";

void check(Error error, const std::string& what) {
  if (error == Error::Ok) return;
  throw std::runtime_error(what + ": " + executorch::runtime::to_string(error) + "; the log above says why");
}

std::vector<int64_t> as_shape(executorch::runtime::Span<const int32_t> sizes) { return {sizes.begin(), sizes.end()}; }

// The runtime also checks shapes; this message has more details, and comes before a tensor is made. The program's sizes are
// those that it has memory for: the largest ones of dynamic shapes.
void check_input(const MethodMeta& method, size_t index, const std::string& path, const Array& array) {
  const std::string number = "input " + std::to_string(index);
  const auto tag = method.input_tag(index);
  check(tag.error(), number);
  if (*tag != Tag::Tensor) throw std::runtime_error(number + " of the program is not a tensor; expected only tensors");
  const auto meta = method.input_tensor_meta(index);
  check(meta.error(), number);
  const std::vector<int64_t> most = as_shape(meta->sizes());
  bool fits = array.shape.size() == most.size() && array.type->number == static_cast<int>(meta->scalar_type());
  for (size_t d = 0; fits && d < most.size(); ++d) fits = array.shape[d] <= most[d];
  if (!fits) {
    throw std::runtime_error(path + " is " + describe(array.type, array.shape) + "; expected " +
                             describe(type_of_number(static_cast<int>(meta->scalar_type())), most) +
                             " at most, " + number + " of the program");
  }
}

void run(int argc, char** argv) {
  const Options options = parse_options(argc, argv, ".pte");
  std::vector<Array> arrays;
  for (const std::string& path : options.inputs) arrays.push_back(read_npy(path));

  Module module(options.model);
  check(module.load(Program::Verification::InternalConsistency), options.model + " does not load");
  const auto method = module.method_meta(kMethod);
  check(method.error(), options.model + " has no usable method '" + kMethod + "'");
  if (method->num_inputs() != arrays.size()) {
    throw std::runtime_error(std::to_string(arrays.size()) + " inputs were given; expected " +
                             std::to_string(method->num_inputs()));
  }
  for (size_t i = 0; i < arrays.size(); ++i) check_input(*method, i, options.inputs[i], arrays[i]);
  check(module.load_method(kMethod), options.model + " does not load");

  std::vector<TensorPtr> tensors;
  std::vector<EValue> inputs;
  for (Array& array : arrays) {
    tensors.push_back(executorch::extension::from_blob(array.data.data(), {array.shape.begin(), array.shape.end()},
                                                       static_cast<ScalarType>(array.type->number)));
    inputs.emplace_back(tensors.back());
  }
  const auto call = [&] {
    auto outputs = module.execute(kMethod, inputs);
    check(outputs.error(), "the call failed");
    return std::move(*outputs);
  };
  const std::vector<EValue> outputs = call();
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].isTensor()) {
      std::printf("output %zu: not a tensor\n", i);
      continue;
    }
    const auto& tensor = outputs[i].toTensor();
    std::vector<int64_t> shape(tensor.sizes().begin(), tensor.sizes().end());
    show(options, i, type_of_number(static_cast<int>(tensor.scalar_type())), shape, tensor.const_data_ptr());
  }
  time_calls(options.runs, call);
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("pte_runner", [&] { run(argc, argv); });
}
