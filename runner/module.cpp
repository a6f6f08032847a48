// Tokenizers of tokens files in lowbit._C.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tokenizer.h"

namespace py = pybind11;
using namespace lowbit;

namespace {

using Tokens = std::vector<int64_t>;

void raise_unless_ok(const Status& status) {
  if (status.kind() == Status::Kind::no_memory) throw std::bad_alloc();
  if (!status.ok()) throw py::value_error(status.message());
}

std::unique_ptr<Tokenizer> made_of(const std::string& bytes) {
  std::unique_ptr<Tokenizer> made;
  raise_unless_ok(Tokenizer::read(bytes.data(), bytes.size(), &made));
  return made;
}

std::unique_ptr<Tokenizer> opened(const std::string& file) {
  std::unique_ptr<Tokenizer> made;
  raise_unless_ok(Tokenizer::open(file, &made));
  return made;
}

Tokens encode(const Tokenizer& tokenizer, const std::string& text, bool special) {
  Tokens tokens;
  Status status;
  {
    py::gil_scoped_release release;
    status = tokenizer.encode(text, special, &tokens);
  }
  raise_unless_ok(status);
  return tokens;
}

std::vector<std::tuple<int64_t, std::string, std::string, bool>> added(const Tokenizer& tokenizer) {
  std::vector<std::tuple<int64_t, std::string, std::string, bool>> result;
  for (const AddedToken& each : tokenizer.added()) result.emplace_back(each.token, each.text, each.shown, each.special);
  return result;
}

std::string push(TokenStream& stream, int64_t token) {
  std::string text;
  raise_unless_ok(stream.push(token, &text));
  return text;
}

std::string decode(const Tokenizer& tokenizer, const Tokens& tokens, bool plain) {
  std::string text;
  raise_unless_ok(tokenizer.decode(tokens, plain, &text));
  return text;
}

// Converts tokens to text one by one.
std::vector<std::string> stream(const Tokenizer& tokenizer, const Tokens& prompt, const Tokens& tokens) {
  TokenStream made(tokenizer, prompt);
  std::vector<std::string> texts;
  for (const int64_t token : tokens) raise_unless_ok(made.push(token, &texts.emplace_back()));
  return texts;
}

Conversation conversation(const std::optional<std::string>& system, const std::vector<std::string>& messages) {
  return {system.has_value(), system.value_or(""), messages};
}

Tokens chat(const Tokenizer& tokenizer, const std::optional<std::string>& system, const std::vector<std::string>& messages) {
  Tokens tokens;
  raise_unless_ok(tokenizer.chat(conversation(system, messages), &tokens));
  return tokens;
}

std::string chat_text(const Tokenizer& tokenizer, const std::optional<std::string>& system,
                      const std::vector<std::string>& messages) {
  std::string text;
  raise_unless_ok(tokenizer.chat_text(conversation(system, messages), &text));
  return text;
}

}  // namespace

void add_tokenizers(py::module_& module) {
  py::class_<Tokenizer>(module, "Tokenizer")
      .def(py::init(&made_of), py::arg("content"))
      .def_property_readonly("size", &Tokenizer::size)
      .def_property_readonly("plan", [](const Tokenizer& tokenizer) { return tokenizer.settings().plan; })
      .def_property_readonly("added", &added)
      .def("encode", &encode, py::arg("text"), py::arg("special"))
      .def("decode", &decode, py::arg("tokens"), py::arg("plain"))
      .def("stream", &stream, py::arg("prompt"), py::arg("tokens"))
      .def("chat", &chat, py::arg("system"), py::arg("messages"))
      .def("chat_text", &chat_text, py::arg("system"), py::arg("messages"));
  py::class_<TokenStream>(module, "TokenStream")
      .def(py::init<const Tokenizer&, Tokens>(), py::arg("tokenizer"), py::arg("prompt"), py::keep_alive<1, 2>())
      .def("push", &push, py::arg("token"));
  module.def("open_tokenizer", &opened, py::arg("file"));
}
