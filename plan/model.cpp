#include "model.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "../kernels/numeric.h"
#include "../ops/aligned_memory.h"
#include "mapped_file.h"
#include "plan.h"
#include "session.h"

namespace lowbit {
namespace {

constexpr int64_t kTextRows = 256;  // tokens of texts that an encoder computes in one call, whose activations stay in a cache
constexpr int64_t kPiece = 256;  // tokens of a call; more take longer to write to memory than they save
constexpr int64_t kMostLength = int64_t{1} << 24;
constexpr int64_t kMostTokens = int64_t{1} << 28;  // in a vocabulary

ElementType storage_of(TextCache type) {
  switch (type) {
    case TextCache::f32: return ElementType::f32;
    case TextCache::bf16: return ElementType::bf16;
    case TextCache::f16: return ElementType::f16;
    default: return ElementType::i8;
  }
}

// The last dimension of a cache: codes, and in integers the scale of a position.
int64_t stored_width(int64_t width, TextCache type) {
  return type == TextCache::i4 ? width / 2 + kScaleBytes : type == TextCache::i8 ? width + kScaleBytes : width;
}

const std::vector<int64_t>& fact(const Plan& plan, const char* name) {
  static const std::vector<int64_t> none;
  const auto found = plan.about.find(name);
  return found == plan.about.end() ? none : found->second;
}

int64_t number(const Plan& plan, const char* name) {
  const std::vector<int64_t>& values = fact(plan, name);
  return values.empty() ? 0 : values[0];
}

}  // namespace

bool cache_named(const std::string& name, TextCache* type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8", "int4"};
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) return false;
  *type = static_cast<TextCache>(found - std::begin(kNames));
  return true;
}

PlanSession::PlanSession(std::unique_ptr<Implementation> implementation) : implementation_(std::move(implementation)) {}
PlanSession::~PlanSession() = default;
int64_t PlanSession::length() const { return implementation_->length; }
int64_t PlanSession::position() const { return implementation_->position(); }
const std::vector<int64_t>& PlanSession::tokens() const { return implementation_->tokens; }
bool PlanSession::recurrent() const { return implementation_->recurrent; }

Status PlanSession::cut(int64_t count) {
  Implementation& own = *implementation_;
  if (count < 0 || count > own.position()) {
    return Status::error("a text of %" PRId64 " tokens is cut to %" PRId64, own.position(), count);
  }
  if (own.recurrent && count != 0 && count != own.position()) {
    return Status::error("a text of a model with states is cut to %" PRId64 " tokens; expected 0", count);
  }
  own.tokens.resize(static_cast<size_t>(count));
  return {};
}

struct PlanModel::Implementation {
  std::map<std::string, MappedFile> files;
  std::unique_ptr<PlanRun> run;
  std::mutex busy;
  std::vector<char> output;  // logits of 16 bits
  ElementType output_type = ElementType::f32;
  uint64_t digest = 0;  // identifies the plan

  // Finds the memory that a weight is a part of.
  using Find = std::function<Status(Implementation& own, const Buffer& weight, Memory* whole)>;
  static Status make(const std::string& name, const Memory& bytes, const Threads& threads, const Find& find,
                     std::unique_ptr<Implementation>* made);
};

PlanModel::PlanModel(std::unique_ptr<Implementation> implementation) : implementation_(std::move(implementation)) {}
PlanModel::~PlanModel() = default;
int64_t PlanModel::vocabulary() const { return number(implementation_->run->plan(), "vocabulary"); }
int64_t PlanModel::positions() const { return number(implementation_->run->plan(), "positions"); }
const std::vector<int64_t>& PlanModel::stop() const { return fact(implementation_->run->plan(), "stop"); }
const Plan& PlanModel::plan() const { return implementation_->run->plan(); }

Status PlanModel::Implementation::make(const std::string& name, const Memory& bytes, const Threads& threads, const Find& find,
                                       std::unique_ptr<Implementation>* made) {
  if (threads.count < 1 || threads.count > 1024) {
    return Status::error("there are %d threads; expected 1 to 1024", threads.count);
  }
  auto own = std::make_unique<Implementation>();
  own->digest = lowbit::digest(bytes.data, static_cast<size_t>(bytes.bytes));
  Plan plan;
  if (Status status = read_plan(bytes.data, static_cast<size_t>(bytes.bytes), &plan); !status.ok()) {
    return status.with_prefix((name + ": ").c_str());
  }
  if (number(plan, "vocabulary") < 1 || number(plan, "vocabulary") > kMostTokens || number(plan, "positions") < 1) {
    return Status::error("%s has a vocabulary of %" PRId64 " tokens and %" PRId64 " positions; expected the plan of a "
                         "language model", name.c_str(), number(plan, "vocabulary"), number(plan, "positions"));
  }
  (void)type_of_output(plan, &own->output_type);  // of a plan without one: float32
  if (!is_activation_type(own->output_type)) {
    return Status::error("%s has logits of %s; expected floats", name.c_str(), name_of(own->output_type));
  }
  try {
    own->run = std::make_unique<PlanRun>(std::move(plan), threads);
  } catch (const std::system_error& error) {
    return Status::system("%d threads cannot be started: %s", threads.count, error.what());
  }
  const std::vector<Buffer>& buffers = own->run->plan().buffers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = buffers[i];
    if (buffer.kind != BufferKind::weight) continue;
    Memory whole;
    if (Status status = find(*own, buffer, &whole); !status.ok()) return status;
    if (buffer.bytes.constant < 1 || buffer.offset > whole.bytes || buffer.bytes.constant > whole.bytes - buffer.offset) {
      return Status::error("weight %s has %" PRId64 " bytes from byte %" PRId64 " of %s, which has %" PRId64 "; expected the "
                           "weights that the plan was made for", buffer.name.c_str(), buffer.bytes.constant, buffer.offset,
                           buffer.file.empty() ? name.c_str() : buffer.file.c_str(), whole.bytes);
    }
    const Memory part{static_cast<char*>(whole.data) + buffer.offset, buffer.bytes.constant};
    if (checksum(part.data, static_cast<size_t>(std::min(part.bytes, kChecked))) != buffer.checksum) {
      return Status::error("weight %s has changed since the plan was made; make it again", buffer.name.c_str());
    }
    if (Status status = own->run->bind(static_cast<int64_t>(i), part); !status.ok()) return status;
  }
  *made = std::move(own);
  return {};
}

Status PlanModel::open(const std::string& path, const Threads& threads, std::unique_ptr<PlanModel>* model) {
  try {
    const std::string file = is_directory(path) ? path + "/lowbit.plan" : path;
    MappedFile mapped;
    if (Status status = mapped.open(file); !status.ok()) return status;
    const std::string directory = file.substr(0, file.find_last_of("/\\") + 1);
    const auto find = [&](Implementation& own, const Buffer& weight, Memory* whole) {
      if (weight.file.empty() || weight.file.find_first_of("/\\") != std::string::npos) {
        return Status::error("weight %s of %s is in the file '%s'; expected one beside it", weight.name.c_str(), file.c_str(),
                             weight.file.c_str());
      }
      const auto [found, is_new] = own.files.try_emplace(weight.file);
      if (is_new) {
        if (Status status = found->second.open(directory + weight.file); !status.ok()) return status;
      }
      *whole = found->second.memory();
      return Status();
    };
    std::unique_ptr<Implementation> own;
    if (Status status = Implementation::make(file, mapped.memory(), threads, find, &own); !status.ok()) return status;
    model->reset(new PlanModel(std::move(own)));
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for %s", path.c_str());
  }
}

Status PlanModel::open(const void* bytes, size_t size, const Threads& threads, std::unique_ptr<PlanModel>* model) {
  uint64_t plan_bytes = 0;
  if (size >= sizeof plan_bytes) std::memcpy(&plan_bytes, bytes, sizeof plan_bytes);
  if (size < sizeof plan_bytes || plan_bytes > size - sizeof plan_bytes) {
    return Status::error("%zu bytes begin with a plan of %" PRIu64 "; expected a plan and its weights", size, plan_bytes);
  }
  try {
    char* const begin = const_cast<char*>(static_cast<const char*>(bytes));  // only read
    const size_t aligned = (sizeof plan_bytes + static_cast<size_t>(plan_bytes) + kAlignment - 1) / kAlignment * kAlignment;
    const size_t behind = std::min(aligned, size);
    const auto find = [&](Implementation&, const Buffer& weight, Memory* whole) {
      *whole = {begin + behind, static_cast<int64_t>(size - behind)};
      return weight.file.empty() ? Status()
                                 : Status::error("weight %s is in the file '%s'; expected it after the plan",
                                                 weight.name.c_str(), weight.file.c_str());
    };
    std::unique_ptr<Implementation> own;
    const Memory plan{begin + sizeof plan_bytes, static_cast<int64_t>(plan_bytes)};
    if (Status status = Implementation::make("the delegate", plan, threads, find, &own); !status.ok()) return status;
    model->reset(new PlanModel(std::move(own)));
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for a plan of %" PRIu64 " bytes", plan_bytes);
  }
}

Status PlanModel::begin(int64_t length, TextCache keys, TextCache values, std::unique_ptr<PlanSession>* session) const {
  if (length < 1 || length > positions() || length > kMostLength) {
    return Status::error("a text has room for %" PRId64 " tokens; expected 1 to %" PRId64, length, positions());
  }
  if (keys != values && !(keys == TextCache::i8 && values == TextCache::i4)) {
    return Status::error("keys and values have the cache types %d and %d; expected the same, or int8 (3) and int4 (4)",
                         static_cast<int>(keys), static_cast<int>(values));
  }
  try {
    auto own = std::make_unique<PlanSession::Implementation>();
    own->model = implementation_.get();
    own->digest = implementation_->digest;
    own->length = length;
    own->vocabulary = vocabulary();
    own->keys = keys;
    own->values = values;
    for (const Buffer& buffer : implementation_->run->plan().buffers) {
      if (buffer.kind != BufferKind::cache) continue;
      TensorView& view = own->caches.emplace_back();
      own->states.push_back(buffer.slot >= kFirstState);
      if (buffer.slot == kHeld) continue;  // these caches have room for the whole text
      if (buffer.slot == kKeys || buffer.slot == kValues) {
        const TextCache type = buffer.slot == kKeys ? keys : values;
        if (buffer.shape.size() != 2) return Status::error("layer %" PRId64 " has no shape of its caches", buffer.index);
        if (type == TextCache::i4 && buffer.shape[1] % 32 != 0) {
          return Status::error("keys or values have a width of %" PRId64 "; expected a multiple of 32 for a 4-bit cache",
                               buffer.shape[1]);
        }
        view.type = storage_of(type);
        const int64_t rows = (length + kPanel - 1) / kPanel * kPanel;
        view.shape = {4, {1, buffer.shape[0], rows, stored_width(buffer.shape[1], type)}};
      } else {
        own->recurrent = true;
        view.type = buffer.type;
        view.shape.ndim = static_cast<int>(buffer.shape.size());
        std::copy(buffer.shape.begin(), buffer.shape.end(), view.shape.size);
      }
      make_contiguous(&view);
      int64_t bytes = element_bytes(view.type);
      for (int d = 0; d < view.shape.ndim; ++d) {
        if (__builtin_mul_overflow(bytes, view.shape.size[d], &bytes)) return Status::error("a cache is too large");
      }
      // calloc gives large blocks pages of zeros that take memory only when they are written.
      void* const block = is_addressable(bytes) ? std::calloc(static_cast<size_t>(bytes) + kAlignment, 1) : nullptr;
      if (block == nullptr) return Status::no_memory("no memory for a cache of %" PRId64 " bytes", bytes);
      own->memory.emplace_back(block);
      view.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + kAlignment - 1) / kAlignment * kAlignment);
    }
    session->reset(new PlanSession(std::move(own)));
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for a text of %" PRId64 " tokens", length);
  }
}

int64_t PlanModel::default_length() const { return number(implementation_->run->plan(), "length"); }

Status PlanModel::cache_types(TextCache* keys, TextCache* values) const {
  const std::vector<int64_t>& caches = fact(implementation_->run->plan(), "caches");
  const auto is_type = [](int64_t type) { return type >= 0 && type <= static_cast<int64_t>(TextCache::i4); };
  if (caches.size() != 2 || !is_type(caches[0]) || !is_type(caches[1])) {
    return Status::error("the plan does not name the types of its caches");
  }
  *keys = static_cast<TextCache>(caches[0]);
  *values = static_cast<TextCache>(caches[1]);
  return {};
}

Status PlanModel::feed(PlanSession& session, const int64_t* tokens, int64_t count, float* logits) {
  PlanSession::Implementation& text = *session.implementation_;
  const std::lock_guard<std::mutex> lock(implementation_->busy);
  const int64_t size = vocabulary();
  if (width() != 0) return Status::error("the plan is that of an encoder, which writes no text; expected a language model's");
  if (text.model != implementation_.get()) return Status::error("the text belongs to another model");
  if (count < 1 || count > text.length - text.position()) {
    return Status::out_of_range("a text has %" PRId64 " tokens and gets %" PRId64 "; expected at most %" PRId64 " altogether",
                                text.position(), count, text.length);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= size) {
      return Status::error("there is no token %" PRId64 "; expected 0 to %" PRId64, tokens[i], size - 1);
    }
  }
  try {
    const int64_t pieces = (count + kPiece - 1) / kPiece;
    const DType type = dtype_of(implementation_->output_type);
    std::vector<int64_t> positions;
    text.tokens.reserve(static_cast<size_t>(text.position() + count));
    for (int64_t piece = 0, done = 0; piece < pieces; ++piece) {
      const int64_t rows = (count - done) / (pieces - piece);
      positions.resize(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) positions[static_cast<size_t>(i)] = text.position() + i;
      int64_t last = rows - 1;
      const Memory inputs[] = {{const_cast<int64_t*>(tokens + done), 8 * rows}, {positions.data(), 8 * rows}, {&last, 8}};
      if (type != DType::f32) implementation_->output.resize(static_cast<size_t>(size * size_of(type)));
      void* const to = type == DType::f32 ? static_cast<void*>(logits) : implementation_->output.data();
      const Memory output{to, size * size_of(type)};
      const PlanText one{0, rows, text.position(), text.caches.data()};
      if (Status status = implementation_->run->run({rows, 1, inputs, 3, &output, 1, &one, 1}); !status.ok()) return status;
      text.tokens.insert(text.tokens.end(), tokens + done, tokens + done + rows);
      done += rows;
    }
    for (int64_t i = 0; type != DType::f32 && i < size; ++i) logits[i] = load_as_f32(implementation_->output.data(), type, i);
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for a call of %" PRId64 " tokens", count);
  }
}

int64_t PlanModel::width() const { return number(implementation_->run->plan(), "width"); }

size_t PlanModel::cache_count() const {
  const std::vector<Buffer>& buffers = implementation_->run->plan().buffers;
  return static_cast<size_t>(std::count_if(buffers.begin(), buffers.end(), [](const Buffer& buffer) {
    return buffer.kind == BufferKind::cache;
  }));
}

void PlanModel::measure() { implementation_->run->measure(); }
const std::vector<double>& PlanModel::measured() const { return implementation_->run->measured(); }

Status PlanModel::run(const PlanCall& call) {
  const std::lock_guard<std::mutex> lock(implementation_->busy);
  return implementation_->run->run(call);
}

Status PlanModel::embed(const int64_t* ids, const int64_t* types, const int64_t* lengths, int64_t texts, float* vectors) {
  const Plan& plan = implementation_->run->plan();
  const int64_t size = vocabulary(), kinds = number(plan, "types"), numbers = width();
  const std::vector<int64_t>& masks = fact(plan, "masks");
  const std::vector<int64_t>& padding = fact(plan, "padding");
  const int64_t first = number(plan, "first_position");
  const bool fits = numbers > 0 && numbers <= kMostLength && first >= 0 && first <= kMostLength && masks.size() % 2 == 0 &&
                    std::all_of(masks.begin(), masks.end(), [](int64_t each) { return each >= 0; });
  if (!fits || cache_count() != 0) {
    return Status::error("the plan has embeddings of %" PRId64 " numbers, positions from %" PRId64 " on and %zu caches; "
                         "expected the plan of an encoder", numbers, first, cache_count());
  }
  if (texts < 0) return Status::error("there are %" PRId64 " texts; expected 0 or more", texts);
  for (int64_t text = 0, at = 0; text < texts; ++text) {
    if (lengths[text] < 1 || lengths[text] > std::min(positions(), kMostLength)) {
      return Status::out_of_range("text %" PRId64 " has %" PRId64 " tokens; expected 1 to %" PRId64, text, lengths[text],
                                  positions());
    }
    for (const int64_t end = at + lengths[text]; at < end; ++at) {
      if (ids[at] < 0 || ids[at] >= size) {
        return Status::error("there is no token %" PRId64 "; expected 0 to %" PRId64, ids[at], size - 1);
      }
      if (types != nullptr && (types[at] < 0 || types[at] >= std::max<int64_t>(kinds, 1))) {
        return Status::error("a token is of type %" PRId64 "; expected 0 to %" PRId64, types[at],
                             std::max<int64_t>(kinds, 1) - 1);
      }
    }
  }
  const std::lock_guard<std::mutex> lock(implementation_->busy);
  const DType type = dtype_of(implementation_->output_type);
  try {
    std::vector<int64_t> places, kept_types, ranges;
    std::vector<std::vector<int32_t>> bounds(masks.size() / 2);
    std::vector<PlanText> parts;
    for (int64_t text = 0, at = 0; text < texts;) {
      places.clear();
      ranges.clear();
      parts.clear();
      for (auto& each : bounds) each.clear();
      int64_t rows = 0;
      for (; text < texts && (rows == 0 || rows + lengths[text] <= kTextRows); ++text) {
        const int64_t length = lengths[text];
        for (int64_t i = 0, counted = 0; i < length; ++i) {
          // Some models count only the tokens that are not padding.
          const bool is_padding = !padding.empty() && ids[at + rows + i] == padding[0];
          places.push_back(is_padding ? padding[0] : first + counted++);
          // The positions of its own text that a token sees.
          for (size_t m = 0; m < bounds.size(); ++m) {
            const int64_t begin = i > masks[2 * m] ? i - masks[2 * m] : 0;
            const int64_t after = masks[2 * m + 1], end = after < length - i - 1 ? i + 1 + after : length;
            bounds[m].insert(bounds[m].end(), {1, static_cast<int32_t>(begin), static_cast<int32_t>(end)});
          }
        }
        ranges.insert(ranges.end(), {rows, rows + length});
        parts.push_back({rows, rows + length, 0, nullptr});
        rows += length;
      }
      std::vector<Memory> inputs = {{const_cast<int64_t*>(ids + at), 8 * rows}, {places.data(), 8 * rows}};
      if (kinds > 0) {
        kept_types.assign(static_cast<size_t>(rows), 0);
        if (types != nullptr) std::copy_n(types + at, rows, kept_types.begin());
        inputs.push_back({kept_types.data(), 8 * rows});
      }
      inputs.push_back({ranges.data(), 8 * static_cast<int64_t>(ranges.size())});
      for (auto& each : bounds) inputs.push_back({each.data(), 4 * static_cast<int64_t>(each.size())});
      const int64_t count = static_cast<int64_t>(parts.size()), values = count * numbers;
      if (type != DType::f32) implementation_->output.resize(static_cast<size_t>(values * size_of(type)));
      float* const to = vectors + (text - count) * numbers;
      const Memory output{type == DType::f32 ? static_cast<void*>(to) : implementation_->output.data(), values * size_of(type)};
      const PlanCall call{rows, count, inputs.data(), static_cast<int64_t>(inputs.size()), &output, 1, parts.data(), count};
      if (Status status = implementation_->run->run(call); !status.ok()) return status;
      for (int64_t i = 0; type != DType::f32 && i < values; ++i) to[i] = load_as_f32(implementation_->output.data(), type, i);
      at += rows;
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for %" PRId64 " texts", texts);
  }
}

Status PlanModel::certify(uint64_t* certificate) {
  constexpr int64_t kTogether = 48, kAlone = 16;
  const int64_t size = vocabulary();
  const int64_t length = std::min(positions(), kTogether + kAlone), together = length - length / 4;
  try {
    std::unique_ptr<PlanSession> session;
    if (Status status = begin(length, TextCache::f32, TextCache::f32, &session); !status.ok()) return status;
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < together; ++i) tokens.push_back((31 * i * i + 7 * i + 3) % size);
    std::vector<float> logits(static_cast<size_t>(size));
    *certificate = kEmptyDigest;
    while (session->position() < length) {
      if (Status status = feed(*session, tokens.data(), static_cast<int64_t>(tokens.size()), logits.data()); !status.ok()) {
        return status;
      }
      *certificate = digest(logits.data(), logits.size() * sizeof(float), *certificate);
      tokens = {std::max_element(logits.begin(), logits.end()) - logits.begin()};
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory for the logits of %" PRId64 " tokens", size);
  }
}

uint64_t digest(const void* bytes, size_t size, uint64_t from) {
  for (size_t i = 0; i < size; ++i) from = (from ^ static_cast<const uint8_t*>(bytes)[i]) * 0x100000001b3u;
  return from;
}

}  // namespace lowbit
