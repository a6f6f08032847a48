// Plans in lowbit._C.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cores.h"
#include "model.h"
#include "plan.h"
#include "real_functions.h"

namespace py = pybind11;
using namespace lowbit;

namespace {

void raise_unless_ok(const Status& status) {
  switch (status.kind()) {
    case Status::Kind::ok: return;
    case Status::Kind::no_memory: throw std::bad_alloc();
    case Status::Kind::out_of_range: throw py::index_error(status.message());
    case Status::Kind::system: PyErr_SetString(PyExc_OSError, status.message()); throw py::error_already_set();
    default: throw py::value_error(status.message());
  }
}

using Address = std::pair<uintptr_t, int64_t>;  // and bytes

Memory memory_at(const Address& address) { return {reinterpret_cast<void*>(address.first), address.second}; }

// The tensors of a text, for each cache of a plan: address, number of its ElementType, shape. Contiguous.
struct Caches {
  std::vector<TensorView> views;

  explicit Caches(const std::vector<std::optional<std::tuple<uintptr_t, int, std::vector<int64_t>>>>& tensors) {
    for (const auto& tensor : tensors) {
      TensorView& view = views.emplace_back();
      if (!tensor.has_value()) continue;
      const auto& [address, type, shape] = *tensor;
      if (shape.size() > static_cast<size_t>(kMaxDims)) throw py::value_error("a cache has too many dimensions");
      view.data = reinterpret_cast<void*>(address);
      view.type = static_cast<ElementType>(type);
      view.shape.ndim = static_cast<int>(shape.size());
      std::copy(shape.begin(), shape.end(), view.shape.size);
      make_contiguous(&view);
    }
  }
};

// A call with the caller's memory.
template <class Run>
void run_call(const Run& run, int64_t rows, int64_t kept, const std::vector<Address>& inputs,
              const std::vector<Address>& outputs,
              const std::vector<std::tuple<int64_t, int64_t, int64_t, const Caches*>>& texts, size_t caches_per_text) {
  std::vector<Memory> in, out;
  for (const Address& each : inputs) in.push_back(memory_at(each));
  for (const Address& each : outputs) out.push_back(memory_at(each));
  std::vector<PlanText> list;
  for (const auto& [begin, end, start, caches] : texts) {
    if (caches == nullptr || caches->views.size() != caches_per_text) {
      throw py::value_error("a text has tensors for another plan; expected " + std::to_string(caches_per_text));
    }
    list.push_back({begin, end, start, caches->views.data()});
  }
  Status status;
  {
    py::gil_scoped_release release;
    status = run({rows, kept, in.data(), static_cast<int64_t>(in.size()), out.data(), static_cast<int64_t>(out.size()),
                  list.data(), static_cast<int64_t>(list.size())});
  }
  raise_unless_ok(status);
}

// The seconds of operators by their names.
py::dict named(const std::vector<double>& times) {
  py::dict result;
  for (size_t i = 0; i < times.size(); ++i) {
    if (times[i] > 0.0) result[name_of(static_cast<Opcode>(i))] = times[i];
  }
  return result;
}

// The caller keeps all memory alive.
class Runner {
 public:
  Runner(const py::bytes& bytes, int threads) {
    if (threads < 1 || threads > 1024) throw py::value_error("threads is " + std::to_string(threads) + "; expected 1 to 1024");
    const std::string_view view(bytes);
    Plan plan;
    raise_unless_ok(read_plan(view.data(), view.size(), &plan));
    for (const Buffer& buffer : plan.buffers) {
      const int64_t at = &buffer - plan.buffers.data();
      if (buffer.kind == BufferKind::weight) weights_.emplace_back(at, buffer.name, buffer.bytes.constant);
      if (buffer.kind == BufferKind::cache) caches_.emplace_back(buffer.index, buffer.slot);
    }
    run_ = std::make_unique<PlanRun>(std::move(plan), threads);
  }

  void bind(int64_t buffer, const Address& memory) { raise_unless_ok(run_->bind(buffer, memory_at(memory))); }

  void run(int64_t rows, int64_t kept, const std::vector<Address>& inputs, const std::vector<Address>& outputs,
           const std::vector<std::tuple<int64_t, int64_t, int64_t, const Caches*>>& texts) {
    const auto locked = [&](const PlanCall& call) {
      const std::lock_guard<std::mutex> lock(busy_);
      return run_->run(call);
    };
    run_call(locked, rows, kept, inputs, outputs, texts, caches_.size());
  }

  void measure() { run_->measure(); }
  py::dict measured() const { return named(run_->measured()); }

  const std::vector<std::tuple<int64_t, std::string, int64_t>>& weights() const { return weights_; }
  const std::vector<std::pair<int64_t, int64_t>>& caches() const { return caches_; }

 private:
  std::unique_ptr<PlanRun> run_;
  std::mutex busy_;
  std::vector<std::tuple<int64_t, std::string, int64_t>> weights_;
  std::vector<std::pair<int64_t, int64_t>> caches_;
};

TextCache cache_type(const std::string& name) {
  TextCache type;
  if (cache_named(name, &type)) return type;
  throw py::value_error("a cache is '" + name + "'; expected float32, bfloat16, float16, int8 or int4");
}

std::unique_ptr<PlanModel> open_model(const std::string& file, int threads) {
  std::unique_ptr<PlanModel> model;
  Status status;
  {
    py::gil_scoped_release release;
    status = PlanModel::open(file, threads, &model);
  }
  raise_unless_ok(status);
  return model;
}

std::unique_ptr<PlanSession> begin(const PlanModel& model, int64_t length, const std::string& keys, const std::string& values) {
  std::unique_ptr<PlanSession> session;
  raise_unless_ok(model.begin(length, cache_type(keys), cache_type(values), &session));
  return session;
}

// Writes the logits after the last token to `logits`, float32 [vocabulary].
void feed(PlanModel& model, PlanSession& session, const std::vector<int64_t>& tokens, uintptr_t logits) {
  Status status;
  {
    py::gil_scoped_release release;
    status = model.feed(session, tokens.data(), static_cast<int64_t>(tokens.size()), reinterpret_cast<float*>(logits));
  }
  raise_unless_ok(status);
}

// The caches of a plan, in their order: layer, slot, shape, and the number of the ElementType of a state.
std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>, int>> caches_of(const PlanModel& model) {
  std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>, int>> result;
  for (const Buffer& buffer : model.plan().buffers) {
    if (buffer.kind != BufferKind::cache) continue;
    result.emplace_back(buffer.index, buffer.slot, buffer.shape, static_cast<int>(buffer.type));
  }
  return result;
}

// The windows of layers that have one, by layer.
std::map<int64_t, int64_t> windows_of(const PlanModel& model) {
  std::map<int64_t, int64_t> result;
  for (const PlanStep& step : model.plan().steps) {
    if (step.op == Opcode::attention && step.integers[1] > 0) result[step.integers[0]] = step.integers[1];
  }
  return result;
}

// The weights that each step reads: name of the operator, name and bytes of the weight.
std::vector<std::tuple<std::string, std::string, int64_t>> weights_of(const PlanModel& model) {
  std::vector<std::tuple<std::string, std::string, int64_t>> result;
  for (const PlanStep& step : model.plan().steps) {
    for (const Operand& operand : step.operands) {
      if (operand.buffer < 0) continue;
      const Buffer& buffer = model.plan().buffers[static_cast<size_t>(operand.buffer)];
      if (buffer.kind == BufferKind::weight) result.emplace_back(name_of(step.op), buffer.name, buffer.bytes.constant);
    }
  }
  return result;
}

// The number of the ElementType of a plan's output.
int output_type_of(const PlanModel& model) {
  ElementType type;
  if (!type_of_output(model.plan(), &type)) throw py::value_error("the plan has no output");
  return static_cast<int>(type);
}

void run_model(PlanModel& model, int64_t rows, int64_t kept, const std::vector<Address>& inputs,
               const std::vector<Address>& outputs,
               const std::vector<std::tuple<int64_t, int64_t, int64_t, const Caches*>>& texts) {
  run_call([&](const PlanCall& call) { return model.run(call); }, rows, kept, inputs, outputs, texts, model.cache_count());
}

// Writes the vectors of texts to `vectors`, float32 [texts, width].
void embed(PlanModel& model, const std::vector<int64_t>& ids, const std::vector<int64_t>& types,
           const std::vector<int64_t>& lengths, uintptr_t vectors) {
  int64_t tokens = 0;
  for (const int64_t length : lengths) {
    if (length < 0 || __builtin_add_overflow(tokens, length, &tokens)) throw py::value_error("a text has no possible length");
  }
  for (const size_t count : {ids.size(), types.empty() ? ids.size() : types.size()}) {
    if (count != static_cast<size_t>(tokens)) {
      throw py::value_error("there are " + std::to_string(count) + " ids or types for texts of " + std::to_string(tokens) +
                            " tokens");
    }
  }
  Status status;
  {
    py::gil_scoped_release release;
    status = model.embed(ids.data(), types.empty() ? nullptr : types.data(), lengths.data(),
                         static_cast<int64_t>(lengths.size()), reinterpret_cast<float*>(vectors));
  }
  raise_unless_ok(status);
}

// sin of `count` numbers, or with quarter 1 cos.
void sines(uintptr_t x, int64_t count, int64_t quarter, uintptr_t out) {
  const float* const from = reinterpret_cast<const float*>(x);
  float* const to = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(sine_of(static_cast<double>(from[i]), quarter));
}

}  // namespace

void add_plans(py::module_& module) {
  py::class_<Caches>(module, "PlanCaches")
      .def(py::init<const std::vector<std::optional<std::tuple<uintptr_t, int, std::vector<int64_t>>>>&>(), py::arg("tensors"));
  py::class_<Runner>(module, "PlanRunner")
      .def(py::init<const py::bytes&, int>(), py::arg("plan"), py::arg("threads"))
      .def("bind", &Runner::bind, py::arg("buffer"), py::arg("memory"))
      .def("run", &Runner::run, py::arg("rows"), py::arg("kept"), py::arg("inputs"), py::arg("outputs"), py::arg("texts"))
      .def("measure", &Runner::measure)
      .def("times", &Runner::measured)
      .def_property_readonly("weights", &Runner::weights)
      .def_property_readonly("caches", &Runner::caches);
  py::class_<PlanSession>(module, "PlanSession")
      .def_property_readonly("length", &PlanSession::length)
      .def_property_readonly("position", &PlanSession::position)
      .def_property_readonly("recurrent", &PlanSession::recurrent)
      .def_property_readonly("tokens", &PlanSession::tokens)
      .def("cut", [](PlanSession& session, int64_t count) { raise_unless_ok(session.cut(count)); }, py::arg("count"))
      .def("save", [](const PlanSession& session, const std::string& file) { raise_unless_ok(session.save(file)); },
           py::arg("file"))
      .def("load", [](PlanSession& session, const std::string& file) { raise_unless_ok(session.load(file)); },
           py::arg("file"));
  py::class_<PlanModel>(module, "PlanModel")
      .def(py::init(&open_model), py::arg("file"), py::arg("threads"))
      .def_property_readonly("vocabulary", &PlanModel::vocabulary)
      .def_property_readonly("positions", &PlanModel::positions)
      .def_property_readonly("stop", &PlanModel::stop)
      .def_property_readonly("about", [](const PlanModel& model) { return model.plan().about; })
      .def_property_readonly("caches", &caches_of)
      .def_property_readonly("windows", &windows_of)
      .def_property_readonly("weights", &weights_of)
      .def("measure", &PlanModel::measure)
      .def("times", [](const PlanModel& model) { return named(model.measured()); })
      .def_property_readonly("output_type", &output_type_of)
      .def("begin", &begin, py::arg("length"), py::arg("keys"), py::arg("values"))
      .def("certify", [](PlanModel& model) {
        uint64_t certificate = 0;
        Status status;
        {
          py::gil_scoped_release release;
          status = model.certify(&certificate);
        }
        raise_unless_ok(status);
        return certificate;
      })
      .def_property_readonly("width", &PlanModel::width)
      .def("run", &run_model, py::arg("rows"), py::arg("kept"), py::arg("inputs"), py::arg("outputs"), py::arg("texts"))
      .def("embed", &embed, py::arg("ids"), py::arg("types"), py::arg("lengths"), py::arg("vectors"))
      .def("feed", &feed, py::arg("session"), py::arg("tokens"), py::arg("logits"));
  module.def("default_threads", &default_threads);
  module.def("digest", [](uintptr_t address, size_t size, uint64_t from) {
    return digest(reinterpret_cast<const void*>(address), size, from);
  }, py::arg("address"), py::arg("size"), py::arg("from_") = kEmptyDigest);
  module.def("sine", &sines, py::arg("x"), py::arg("count"), py::arg("quarter"), py::arg("out"));
}
