// plan/lowbit.h over PlanModel.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "lowbit.h"
#include "model.h"

struct lowbit_model {
  std::unique_ptr<lowbit::PlanModel> plan;
};

struct lowbit_text {
  std::unique_ptr<lowbit::PlanSession> session;
};

namespace {

using lowbit::Status;

lowbit_result result_of(const Status& status, lowbit_error* error) {
  if (error != nullptr) std::snprintf(error->message, sizeof error->message, "%s", status.message());
  switch (status.kind()) {
    case Status::Kind::ok: return LOWBIT_OK;
    case Status::Kind::invalid: return LOWBIT_INVALID;
    case Status::Kind::out_of_range: return LOWBIT_OUT_OF_RANGE;
    case Status::Kind::no_memory: return LOWBIT_NO_MEMORY;
    case Status::Kind::system: return LOWBIT_SYSTEM;
  }
  return LOWBIT_INVALID;
}

lowbit_result missing(const char* name, lowbit_error* error) {
  return result_of(Status::error("%s is NULL; expected an address", name), error);
}

// The fields that the caller's version of a struct has; the others are 0.
template <class Options>
Status read_options(const Options* given, Options* options) {
  *options = {};
  if (given == nullptr) return {};
  if (given->size < sizeof(size_t) || given->size > (size_t{1} << 16)) {
    return Status::error("the size of options is %zu; expected the size of their struct, %zu", given->size, sizeof(Options));
  }
  std::memcpy(options, given, std::min(given->size, sizeof(Options)));
  return {};
}

}  // namespace

int lowbit_api_version(void) { return 1; }

lowbit_result lowbit_open(const char* file, const lowbit_open_options* options, lowbit_model** model, lowbit_error* error) {
  if (file == nullptr) return missing("file", error);
  if (model == nullptr) return missing("model", error);
  *model = nullptr;
  lowbit_open_options used;
  if (const Status status = read_options(options, &used); !status.ok()) return result_of(status, error);
  const int threads = used.threads != 0 ? used.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  try {
    auto made = std::make_unique<lowbit_model>();
    const Status status = lowbit::PlanModel::open(file, threads, &made->plan);
    if (status.ok()) *model = made.release();
    return result_of(status, error);
  } catch (const std::bad_alloc&) {
    return result_of(Status::no_memory("no memory for %s", file), error);
  }
}

void lowbit_close(lowbit_model* model) { delete model; }
int64_t lowbit_vocabulary(const lowbit_model* model) { return model->plan->vocabulary(); }
int64_t lowbit_positions(const lowbit_model* model) { return model->plan->positions(); }

size_t lowbit_stop_tokens(const lowbit_model* model, int64_t* tokens, size_t most) {
  const auto& stop = model->plan->stop();
  if (tokens != nullptr) std::copy_n(stop.begin(), std::min(most, stop.size()), tokens);
  return stop.size();
}

lowbit_result lowbit_text_new(const lowbit_model* model, const lowbit_text_options* options, lowbit_text** text,
                              lowbit_error* error) {
  if (model == nullptr) return missing("model", error);
  if (text == nullptr) return missing("text", error);
  *text = nullptr;
  lowbit_text_options used;
  if (const Status status = read_options(options, &used); !status.ok()) return result_of(status, error);
  for (const int64_t cache : {static_cast<int64_t>(used.keys), static_cast<int64_t>(used.values)}) {
    if (cache < LOWBIT_F32 || cache > LOWBIT_I4) {
      return result_of(Status::error("a cache is %d; expected LOWBIT_F32 to LOWBIT_I4", static_cast<int>(cache)), error);
    }
  }
  const int64_t length = used.length != 0 ? used.length : std::min<int64_t>(2048, model->plan->positions());
  try {
    auto made = std::make_unique<lowbit_text>();
    const Status status = model->plan->begin(length, static_cast<lowbit::TextCache>(used.keys),
                                             static_cast<lowbit::TextCache>(used.values), &made->session);
    if (status.ok()) *text = made.release();
    return result_of(status, error);
  } catch (const std::bad_alloc&) {
    return result_of(Status::no_memory("no memory for a text"), error);
  }
}

void lowbit_text_free(lowbit_text* text) { delete text; }
int64_t lowbit_text_length(const lowbit_text* text) { return text->session->length(); }
int64_t lowbit_text_position(const lowbit_text* text) { return text->session->position(); }

lowbit_result lowbit_text_cut(lowbit_text* text, int64_t count, lowbit_error* error) {
  if (text == nullptr) return missing("text", error);
  return result_of(text->session->cut(count), error);
}

lowbit_result lowbit_feed(lowbit_model* model, lowbit_text* text, const int64_t* tokens, int64_t count, float* logits,
                          lowbit_error* error) {
  if (model == nullptr) return missing("model", error);
  if (text == nullptr) return missing("text", error);
  if (tokens == nullptr) return missing("tokens", error);
  if (logits == nullptr) return missing("logits", error);
  return result_of(model->plan->feed(*text->session, tokens, count, logits), error);
}

int64_t lowbit_width(const lowbit_model* model) { return model->plan->width(); }

lowbit_result lowbit_embed(lowbit_model* model, const int64_t* ids, const int64_t* types, const int64_t* lengths, int64_t texts,
                           float* vectors, lowbit_error* error) {
  if (model == nullptr) return missing("model", error);
  if (ids == nullptr) return missing("ids", error);
  if (lengths == nullptr) return missing("lengths", error);
  if (vectors == nullptr) return missing("vectors", error);
  return result_of(model->plan->embed(ids, types, lengths, texts, vectors), error);
}

int64_t lowbit_most_likely(const float* logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return vocabulary > 0 && std::isfinite(logits[best]) ? best : -1;
}

lowbit_result lowbit_certify(lowbit_model* model, uint64_t* certificate, lowbit_error* error) {
  if (model == nullptr) return missing("model", error);
  if (certificate == nullptr) return missing("certificate", error);
  return result_of(model->plan->certify(certificate), error);
}
