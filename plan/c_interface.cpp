// plan/lowbit.h over PlanModel.

#define LOWBIT_BUILDING
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <memory>
#include <new>

#include "c_handles.h"
#include "cores.h"
#include "model.h"
#include "sampling.h"

namespace {

using lowbit::guarded;
using lowbit::missing;
using lowbit::not_open;
using lowbit::Open;
using lowbit::PlanModel;
using lowbit::PlanSession;
using lowbit::Status;

struct Text {
  std::shared_ptr<PlanModel> model;  // first, so that it outlives the session
  std::unique_ptr<PlanSession> session;
};

// Never destroyed, because other threads may use them while the process ends.
Open<lowbit_model, PlanModel>& models() {
  static auto& all = *new Open<lowbit_model, PlanModel>;
  return all;
}
Open<lowbit_text, Text>& texts() {
  static auto& all = *new Open<lowbit_text, Text>;
  return all;
}

// The fields that the caller's version of a struct has; the others are 0.
template <class Options>
Status read_options(const Options* given, Options* options) {
  *options = {};
  if (given == nullptr) return {};
  if (given->size < sizeof(size_t) || given->size > 65536) {
    return Status::error("the size of options is %zu; expected the size of their struct, %zu", given->size, sizeof(Options));
  }
  std::memcpy(options, given, std::min(given->size, sizeof(Options)));
  return {};
}

size_t copy_tokens(const std::vector<int64_t>& from, int64_t* to, size_t most) {
  if (to != nullptr) std::copy_n(from.begin(), std::min(most, from.size()), to);
  return from.size();
}

}  // namespace

int lowbit_api_version(void) { return 2; }

lowbit_result lowbit_open(const char* path, const lowbit_open_options* options, lowbit_model** model, lowbit_error* error) {
  return guarded(error, [&] {
    if (path == nullptr) return missing("path");
    if (model == nullptr) return missing("model");
    *model = nullptr;
    lowbit_open_options used;
    if (Status status = read_options(options, &used); !status.ok()) return status;
    const int threads = used.threads != 0 ? used.threads : lowbit::default_threads();
    std::unique_ptr<PlanModel> made;
    const Status status = PlanModel::open(path, {threads, used.run_tasks, used.host}, &made);
    if (status.ok()) *model = models().add(std::move(made));
    return status;
  });
}

void lowbit_close(lowbit_model* model) { models().remove(model); }

int64_t lowbit_vocabulary(const lowbit_model* model) {
  const auto open = models().find(model);
  return open ? open->vocabulary() : 0;
}

int64_t lowbit_positions(const lowbit_model* model) {
  const auto open = models().find(model);
  return open ? open->positions() : 0;
}

size_t lowbit_stop_tokens(const lowbit_model* model, int64_t* tokens, size_t most) {
  const auto open = models().find(model);
  return open ? copy_tokens(open->stop(), tokens, most) : 0;
}

lowbit_result lowbit_text_new(const lowbit_model* model, const lowbit_text_options* options, lowbit_text** text,
                              lowbit_error* error) {
  return guarded(error, [&] {
    auto made = std::make_shared<Text>();
    made->model = models().find(model);
    if (!made->model) return not_open("model", model);
    if (text == nullptr) return missing("text");
    *text = nullptr;
    lowbit_text_options used;
    if (Status status = read_options(options, &used); !status.ok()) return status;
    for (const int64_t cache : {static_cast<int64_t>(used.keys), static_cast<int64_t>(used.values)}) {
      if (cache < LOWBIT_TEXT_F32 || cache > LOWBIT_TEXT_I4) {
        return Status::error("a cache is %d; expected LOWBIT_TEXT_F32 to LOWBIT_TEXT_I4", static_cast<int>(cache));
      }
    }
    const int64_t length = used.length != 0 ? used.length : std::min<int64_t>(2048, made->model->positions());
    const Status status = made->model->begin(length, static_cast<lowbit::TextCache>(used.keys),
                                             static_cast<lowbit::TextCache>(used.values), &made->session);
    if (status.ok()) *text = texts().add(std::move(made));
    return status;
  });
}

void lowbit_text_free(lowbit_text* text) { texts().remove(text); }

int64_t lowbit_text_length(const lowbit_text* text) {
  const auto open = texts().find(text);
  return open ? open->session->length() : 0;
}

int64_t lowbit_text_position(const lowbit_text* text) {
  const auto open = texts().find(text);
  return open ? open->session->position() : 0;
}

int lowbit_text_recurrent(const lowbit_text* text) {
  const auto open = texts().find(text);
  return open && open->session->recurrent() ? 1 : 0;
}

size_t lowbit_text_tokens(const lowbit_text* text, int64_t* tokens, size_t most) {
  const auto open = texts().find(text);
  return open ? copy_tokens(open->session->tokens(), tokens, most) : 0;
}

lowbit_result lowbit_text_cut(lowbit_text* text, int64_t count, lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = texts().find(text);
    return open ? open->session->cut(count) : not_open("text", text);
  });
}

lowbit_result lowbit_text_save(const lowbit_text* text, const char* file, lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = texts().find(text);
    if (!open) return not_open("text", text);
    return file == nullptr ? missing("file") : open->session->save(file);
  });
}

lowbit_result lowbit_text_load(lowbit_text* text, const char* file, lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = texts().find(text);
    if (!open) return not_open("text", text);
    return file == nullptr ? missing("file") : open->session->load(file);
  });
}

lowbit_result lowbit_feed(lowbit_model* model, lowbit_text* text, const int64_t* tokens, int64_t count, float* logits,
                          lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = models().find(model);
    const auto to = texts().find(text);
    if (!open) return not_open("model", model);
    if (!to) return not_open("text", text);
    if (tokens == nullptr) return missing("tokens");
    if (logits == nullptr) return missing("logits");
    return open->feed(*to->session, tokens, count, logits);
  });
}

int64_t lowbit_width(const lowbit_model* model) {
  const auto open = models().find(model);
  return open ? open->width() : 0;
}

lowbit_result lowbit_embed(lowbit_model* model, const int64_t* ids, const int64_t* types, const int64_t* lengths, int64_t texts,
                           float* vectors, lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = models().find(model);
    if (!open) return not_open("model", model);
    if (ids == nullptr) return missing("ids");
    if (lengths == nullptr) return missing("lengths");
    if (vectors == nullptr) return missing("vectors");
    return open->embed(ids, types, lengths, texts, vectors);
  });
}

int64_t lowbit_most_likely(const float* logits, int64_t vocabulary) {
  return logits == nullptr ? -1 : lowbit::most_likely(logits, vocabulary);
}

void lowbit_seed(lowbit_random* random, uint64_t seed) {
  if (random != nullptr) lowbit::RandomNumbers(seed).keep(random->state);
}

lowbit_result lowbit_sample(const float* logits, int64_t vocabulary, const lowbit_sampling* options, lowbit_random* random,
                            int64_t* token, lowbit_error* error) {
  return guarded(error, [&] {
    if (logits == nullptr) return missing("logits");
    if (random == nullptr) return missing("random");
    if (token == nullptr) return missing("token");
    lowbit_sampling used;
    if (Status status = read_options(options, &used); !status.ok()) return status;
    const lowbit::Sampling sampling{used.temperature, used.top_p == 0 ? 1.0 : used.top_p, used.min_p, 1.0, used.top_k};
    if (Status status = sampling.check(); !status.ok()) return status;
    if (used.temperature != 0 && random->state[3] % 2 == 0) {
      return Status::error("random has no seed; expected that lowbit_seed was called");
    }
    if (vocabulary < 1) return Status::error("there are %" PRId64 " logits; expected one for each token", vocabulary);
    std::vector<float> changed(logits, logits + vocabulary);
    lowbit::RandomNumbers numbers(random->state);
    const Status status = lowbit::draw(sampling, {}, changed, numbers, token);
    numbers.keep(random->state);
    return status;
  });
}

lowbit_result lowbit_certify(lowbit_model* model, uint64_t* certificate, lowbit_error* error) {
  return guarded(error, [&] {
    const auto open = models().find(model);
    if (!open) return not_open("model", model);
    return certificate == nullptr ? missing("certificate") : open->certify(certificate);
  });
}
