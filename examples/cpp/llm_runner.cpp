// Generates with a language model in ExecuTorch: tokens in, tokens out, no Python, no PyTorch. lowbit appears only in
// CMakeLists.txt: linking its operator library registers the operators.

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr_maker.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/platform.h>
#include <lowbit/kernels/numeric.h>

#include "llm.h"
#include "runner.h"

// From ExecuTorch's threadpool library, for which the package has no header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;
using executorch::runtime::Tag;

constexpr char kMethod[] = "forward", kSession[] = "session", kBackend[] = "LowbitPlan";

void check(Error error, const std::string& what) {
  if (error == Error::Ok) return;
  throw std::runtime_error(what + ": " + executorch::runtime::to_string(error) + "; the log above says why");
}

// The result of a method without arguments.
std::vector<int64_t> constants(Module& module, const std::string& file, const std::string& name) {
  const auto names = module.method_names();
  check(names.error(), file + " does not load");
  if (names->count(name) == 0) {
    throw std::runtime_error(file + " has no method '" + name + "'; expected what lowbit.llm.export_decoder writes");
  }
  const auto values = module.execute(name, std::vector<EValue>());
  check(values.error(), "'" + name + "' of " + file + " failed");
  std::vector<int64_t> numbers;
  for (const EValue& value : *values) {
    if (!value.isInt()) throw std::runtime_error("'" + name + "' of " + file + " is not a number");
    numbers.push_back(value.toInt());
  }
  return numbers;
}

int64_t constant(Module& module, const std::string& file, const std::string& name) {
  const std::vector<int64_t> numbers = constants(module, file, name);
  if (numbers.size() != 1 || numbers[0] < 1) {
    throw std::runtime_error("'" + name + "' of " + file + " is not a positive number");
  }
  return numbers[0];
}

// The most tokens in one step; throws if `forward` is not a step of a decoder.
int64_t check_step(Module& module, const std::string& file) {
  const auto method = module.method_meta(kMethod);
  check(method.error(), file + " has no usable method '" + kMethod + "'");
  bool fits = method->num_inputs() == 2 && method->num_outputs() == 1;
  int64_t most = 0;
  for (size_t i = 0; fits && i < 2; ++i) {
    const auto tag = method->input_tag(i);
    fits = tag.ok() && *tag == Tag::Tensor;
    if (!fits) break;
    const auto meta = method->input_tensor_meta(i);
    check(meta.error(), "an input of '" + std::string(kMethod) + "'");
    const auto sizes = meta->sizes();
    fits = meta->scalar_type() == ScalarType::Long && sizes.size() == (i == 0 ? 2 : 1) && sizes[0] == 1;
    if (fits && i == 0) most = sizes[1];
  }
  if (!fits || most < 1) {
    throw std::runtime_error("'" + std::string(kMethod) + "' of " + file +
                             " does not have inputs tokens [1, s] and start [1], both int64, and one output");
  }
  return most;
}

// Runs a command of the method that saves and loads texts; returns the number of tokens of the text.
int64_t command(Module& module, const std::string& file, std::string text) {
  const auto names = module.method_names();
  check(names.error(), file + " does not load");
  if (names->count(kSession) == 0) throw std::runtime_error(file + " has no plan; '" + text + "' needs one");
  const auto size = static_cast<executorch::aten::SizesType>(text.size());
  const auto bytes = from_blob(text.data(), {size}, ScalarType::Byte);  // the value refers to it
  const auto result = module.execute(kSession, std::vector<EValue>{EValue(*bytes)});
  check(result.error(), "'" + text + "' failed");
  if (result->size() != 1 || !result->front().isTensor()) throw std::runtime_error("the result is not a tensor");
  const executorch::aten::Tensor& tokens = result->front().toTensor();
  if (tokens.scalar_type() != ScalarType::Long || tokens.numel() != 1) throw std::runtime_error("the result is not a number");
  return *tokens.const_data_ptr<int64_t>();
}

// The runtime's log without its messages at each start, which would disturb the generated text.
void log_errors(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, size_t line,
                const char* message, size_t) {
  if (level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal) {
    std::fprintf(stderr, "%s:%zu: %s\n", file, line, message);
  }
}

void run(int argc, char** argv) {
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(log_errors, __FILE__));
  const LlmOptions options = parse_llm_options(argc, argv, ".pte");
  if (options.threads > 0) {
    auto* pool = executorch::extension::threadpool::get_threadpool();
    if (!pool || !pool->_unsafe_reset_threadpool(static_cast<uint32_t>(options.threads))) {
      throw std::runtime_error("cannot set the number of threads to " + std::to_string(options.threads));
    }
  }
  Module module(options.model);
  // What a program with a plan can be told when it is loaded.
  executorch::runtime::BackendOptions<2> settings;
  executorch::runtime::LoadBackendOptionsMap backends;
  if (options.max_length > 0) check(settings.set_option("max_length", static_cast<int>(options.max_length)), "--max-length");
  if (!options.cache.empty()) check(settings.set_option("cache", options.cache.c_str()), "--cache");
  check(backends.set_options(kBackend, settings.view()), "the settings");
  check(module.load(backends, Program::Verification::InternalConsistency), options.model + " does not load");
  LanguageModel model;
  model.chunk = check_step(module, options.model);
  check(module.load_method(kMethod), options.model + " does not load");
  model.max_length = constant(module, options.model, "get_max_context_len");
  if (options.max_length > 0 || !options.cache.empty()) command(module, options.model, "use 0");  // refuses without a plan
  if (options.max_length > 0) model.max_length = options.max_length;
  if (!options.load.empty()) model.loaded = command(module, options.model, "load " + options.load);
  model.vocabulary = constant(module, options.model, "get_vocab_size");
  model.stop = constants(module, options.model, "get_eos_ids");
  model.step = [&](int64_t* tokens, int64_t count, int64_t start, std::vector<float>& logits) {
    const auto shape = {1, static_cast<executorch::aten::SizesType>(count)};
    const auto result =
        module.execute(kMethod, {from_blob(tokens, shape, ScalarType::Long), from_blob(&start, {1}, ScalarType::Long)});
    check(result.error(), "the call failed");
    if (result->size() != 1 || !result->front().isTensor()) throw std::runtime_error("the output is not a tensor");
    const auto& tensor = result->front().toTensor();
    const void* data = tensor.const_data_ptr();
    const ScalarType type = tensor.scalar_type();
    logits.resize(static_cast<size_t>(tensor.numel()));
    const auto convert = [&](lowbit::DType dtype) {
      for (size_t i = 0; i < logits.size(); ++i) logits[i] = lowbit::load_as_f32(data, dtype, static_cast<int64_t>(i));
    };
    if (type == ScalarType::Float) {
      convert(lowbit::DType::f32);
    } else if (type == ScalarType::BFloat16) {
      convert(lowbit::DType::bf16);
    } else if (type == ScalarType::Half) {
      convert(lowbit::DType::f16);
    } else {
      throw std::runtime_error("the logits are neither float32 nor bfloat16 nor float16");
    }
  };
  generate(model, options);
  if (!options.save.empty()) command(module, options.model, "save " + options.save);
}

}  // namespace

int main(int argc, char** argv) {
  return guarded("llm_runner", [&] { run(argc, argv); });
}
