// An ExecuTorch backend: a whole call of a decoder as one call of its plan. The delegate's bytes are the plan and its weights.
// A second method, `session`, chooses the text that `forward` continues, and saves and loads texts.

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cinttypes>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "../ops/tensor_view.h"
#include "model.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::BackendOption;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;
using executorch::runtime::Result;
using executorch::runtime::Span;
using lowbit::ElementType;
using lowbit::Status;
using lowbit::TextCache;

constexpr char kName[] = "LowbitPlan";
constexpr char kSession[] = "session";

Error error_of(const Status& status) {
  if (status.ok()) return Error::Ok;
  ET_LOG(Error, "%s: %s", kName, status.message());
  return status.kind() == Status::Kind::no_memory ? Error::MemoryAllocationFailed : Error::InvalidArgument;
}

// A tensor [size] or, with two dimensions, [1, size]. The types of arguments come from a file.
Status read_row(const char* name, EValue* value, int dims, const Tensor** row) {
  if (!value->isTensor()) return Status::error("%s is not a tensor", name);
  const Tensor& tensor = value->toTensor();
  const bool fits = tensor.dim() == dims && (dims == 1 || tensor.size(0) == 1) && tensor.numel() > 0 &&
                    (tensor.numel() == 1 || tensor.strides()[static_cast<size_t>(dims - 1)] == 1);
  if (!fits) return Status::error("%s is not a contiguous tensor of shape %s", name, dims == 1 ? "[n]" : "[1, n]");
  if (tensor.const_data_ptr() == nullptr) return Status::error("%s has no memory", name);
  *row = &tensor;
  return {};
}

// A number, and a space after it if the line does not end.
bool read_number(const char** at, const char* end, int64_t* number) {
  const auto [behind, error] = std::from_chars(*at, end, *number);
  if (error != std::errc() || (behind != end && *behind != ' ')) return false;
  *at = behind == end ? end : behind + 1;
  return true;
}

// A loaded program: its model, and texts by their numbers.
struct Loaded {
  std::mutex busy;
  std::unique_ptr<lowbit::PlanModel> model;
  std::map<int64_t, std::unique_ptr<lowbit::PlanSession>> texts;
  lowbit::PlanSession* text = nullptr;  // the one that `forward` continues
  std::vector<float> logits;

  // Begins an empty text. Empty types and length 0 stand for those of the program.
  Status begin(int64_t number, int64_t length, const std::string& caches) {
    TextCache keys, values;
    if (Status status = model->cache_types(&keys, &values); !status.ok()) return status;
    if (length == 0) length = model->default_length();
    if (!caches.empty()) {
      const size_t comma = caches.find(',');
      const std::string names[] = {caches.substr(0, comma), comma == std::string::npos ? caches : caches.substr(comma + 1)};
      if (!lowbit::cache_named(names[0], &keys) || !lowbit::cache_named(names[1], &values)) {
        return Status::error("a cache is '%s'; expected float32, bfloat16, float16, int8, int4 or int8,int4",
                             caches.c_str());
      }
    }
    std::unique_ptr<lowbit::PlanSession> made;
    if (Status status = model->begin(length, keys, values, &made); !status.ok()) return status;
    text = (texts[number] = std::move(made)).get();
    return {};
  }

  Status use(int64_t number) {
    const auto found = texts.find(number);
    if (found == texts.end()) return Status::error("there is no text %" PRId64 "; expected one that was begun", number);
    text = found->second.get();
    return {};
  }

  Status end(int64_t number) {
    const auto found = texts.find(number);
    if (found == texts.end()) return Status::error("there is no text %" PRId64 "; expected one that was begun", number);
    if (found->second.get() == text) return Status::error("text %" PRId64 " is in use; use another one first", number);
    texts.erase(found);
    return {};
  }

  // begin NUMBER [LENGTH [CACHES]], use NUMBER, end NUMBER, save FILE, load FILE.
  Status command(const std::string& line) {
    const size_t space = std::min(line.find(' '), line.size());
    const std::string verb = line.substr(0, space), rest = line.substr(std::min(space + 1, line.size()));
    if (verb == "save" || verb == "load") {
      if (rest.empty()) return Status::error("'%s' names no file", line.c_str());
      return verb == "save" ? text->save(rest) : text->load(rest);
    }
    const bool begins = verb == "begin";
    const char* at = rest.data();
    const char* const end_of_line = at + rest.size();
    int64_t number = 0, length = 0;
    bool fits = (begins || verb == "use" || verb == "end") && read_number(&at, end_of_line, &number);
    if (begins && at != end_of_line) fits = fits && read_number(&at, end_of_line, &length);
    if (!fits || (at != end_of_line && !begins)) {
      return Status::error("the command is '%s'; expected begin NUMBER [LENGTH [CACHES]], use NUMBER, end NUMBER, save FILE or "
                           "load FILE", line.c_str());
    }
    return begins ? begin(number, length, {at, end_of_line}) : verb == "use" ? use(number) : end(number);
  }

  Status forward(Span<EValue*> values) {
    if (values.size() != 3) {
      return Status::error("a call has %zu values; expected tokens, start and logits", values.size());
    }
    const Tensor *tokens, *start, *out;
    if (Status status = read_row("tokens", values[0], 2, &tokens); !status.ok()) return status;
    if (Status status = read_row("start", values[1], 1, &start); !status.ok()) return status;
    if (Status status = read_row("logits", values[2], 2, &out); !status.ok()) return status;
    if (tokens->scalar_type() != ScalarType::Long || start->scalar_type() != ScalarType::Long || start->numel() != 1) {
      return Status::error("tokens [1, s] or start [1] is not int64");
    }
    const ElementType type = lowbit::element_type_of(out->scalar_type());
    const int64_t size = static_cast<int64_t>(logits.size());
    if (!lowbit::is_activation_type(type) || out->numel() != size) {
      return Status::error("logits has dtype %s and %" PRId64 " elements; expected floats and %" PRId64, lowbit::name_of(type),
                           static_cast<int64_t>(out->numel()), size);
    }
    if (Status status = text->cut(*start->const_data_ptr<int64_t>()); !status.ok()) return status;
    const int64_t* const ids = tokens->const_data_ptr<int64_t>();
    if (Status status = model->feed(*text, ids, tokens->numel(), logits.data()); !status.ok()) return status;
    void* const to = out->mutable_data_ptr();
    for (int64_t i = 0; i < size; ++i) lowbit::store_from_f32(to, lowbit::dtype_of(type), i, logits[static_cast<size_t>(i)]);
    return {};
  }

  // The method `session` takes the bytes of a command, and returns the number of tokens of the text that is then in use.
  Status session(Span<EValue*> values) {
    if (values.size() != 2) return Status::error("a call has %zu values; expected a command and its result", values.size());
    const Tensor *bytes, *out;
    if (Status status = read_row("command", values[0], 1, &bytes); !status.ok()) return status;
    if (Status status = read_row("the result", values[1], 1, &out); !status.ok()) return status;
    if (bytes->scalar_type() != ScalarType::Byte || out->scalar_type() != ScalarType::Long || out->numel() != 1) {
      return Status::error("the command [n] is not uint8, or its result [1] is not int64");
    }
    const char* const line = static_cast<const char*>(bytes->const_data_ptr());
    if (Status status = command({line, static_cast<size_t>(bytes->numel())}); !status.ok()) return status;
    *out->mutable_data_ptr<int64_t>() = text->position();
    return {};
  }
};

// The methods of a program are loaded one by one. They share only the program's map of named data, whose address is the key.
using Key = const NamedDataMap*;

class Programs {
 public:
  void add(Key key, const std::shared_ptr<Loaded>& program) {
    const std::lock_guard<std::mutex> lock(busy_);
    if (key != nullptr) all_.emplace_back(key, program);
  }
  Status find(Key key, std::shared_ptr<Loaded>* program) {
    const std::lock_guard<std::mutex> lock(busy_);
    all_.remove_if([](const auto& each) { return each.second.expired(); });
    for (const auto& each : all_) {
      if (each.first != key) continue;
      if (*program) return Status::error("'forward' is loaded twice; expected once, for 'session' to know which one to use");
      *program = each.second.lock();
    }
    return *program ? Status() : Status::error("'forward' of the program is not loaded; expected that it is loaded first");
  }

 private:
  std::mutex busy_;
  std::list<std::pair<Key, std::weak_ptr<Loaded>>> all_;
};

Programs programs;

// A method: `forward` has the program, `session` finds it.
struct Method {
  std::shared_ptr<Loaded> program;
  Key key = nullptr;

  Status run(Span<EValue*> values) const {
    std::shared_ptr<Loaded> found = program;
    if (!found) {
      if (Status status = programs.find(key, &found); !status.ok()) return status;
    }
    const std::lock_guard<std::mutex> lock(found->busy);
    return program ? found->forward(values) : found->session(values);
  }
};

class PlanBackend final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  // The runtime keeps the delegate's bytes until destroy(), because they are not freed here.
  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    try {
      auto method = std::make_unique<Method>();
      method->key = context.get_named_data_map();
      if (specs.size() > 0 && std::strcmp(specs[0].key, kSession) == 0) return method.release();
      const Result<const void*> bytes = processed->data_safe();
      if (!bytes.ok()) return bytes.error();
      auto program = std::make_shared<Loaded>();
      if (Status status = load(context, *bytes, processed->size(), program.get()); !status.ok()) return error_of(status);
      programs.add(method->key, program);
      method->program = std::move(program);
      return method.release();
    } catch (const std::bad_alloc&) {
      return error_of(Status::no_memory("no memory for a text"));
    }
  }

  Error execute(BackendExecutionContext&, DelegateHandle* handle, Span<EValue*> values) const override {
    try {
      return error_of(static_cast<Method*>(handle)->run(values));
    } catch (const std::bad_alloc&) {
      return error_of(Status::no_memory("no memory for the call"));
    }
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Method*>(handle); }

 private:
  // Options that a program gives when it loads the method: max_length, cache and threads.
  static Status load(const BackendInitContext& context, const void* bytes, size_t size, Loaded* program) {
    // Plans have their own threads, which begin an operator sooner than the pool's. There are as many as in the pool, so
    // that programs have one setting. The pool's sleep meanwhile.
    int threads = static_cast<int>(std::min<int64_t>(executorch::extension::get_thread_count(), 1024)), length = 0;
    std::string caches;
    for (const BackendOption& option : context.runtime_specs()) {
      const int* const number = std::get_if<int>(&option.value);
      const auto* const text = std::get_if<std::array<char, executorch::runtime::kMaxOptionValueLength>>(&option.value);
      if (std::strcmp(option.key, "max_length") == 0 && number != nullptr && *number > 0) {
        length = *number;
      } else if (std::strcmp(option.key, "threads") == 0 && number != nullptr) {
        threads = *number;
      } else if (std::strcmp(option.key, "cache") == 0 && text != nullptr) {
        caches = text->data();
      } else {
        return Status::error("there is no option '%s', or not with this value; expected max_length or threads, positive "
                             "numbers, or cache, a string", option.key);
      }
    }
    if (Status status = lowbit::PlanModel::open(bytes, size, threads, &program->model); !status.ok()) return status;
    program->logits.resize(static_cast<size_t>(program->model->vocabulary()));
    return program->begin(0, length, caches);
  }
};

PlanBackend backend;
[[maybe_unused]] const Error registered = executorch::runtime::register_backend({kName, &backend});

}  // namespace
