/* Language models and encoders in C: opens a plan's file and the weights beside it, takes tokens, gives logits or embeddings.
 * Tokenizers: texts to tokens and back.
 *
 * Every function that can fail returns LOWBIT_OK, or another result and, in `error`, one sentence that says what was found and
 * what was expected. `error` may be NULL. No exception leaves these functions, and no function ends the process. Functions of
 * different models may run at the same time; calls of one model wait for each other. Two threads must not use a text at once.
 * A model or text that is closed, or NULL, is refused like other bad arguments. A text keeps its model's weights until it is
 * freed. Names of files are UTF-8.
 *
 *   lowbit_model* model;
 *   lowbit_text* text;
 *   if (lowbit_open("model", NULL, &model, &error) != LOWBIT_OK) ...
 *   if (lowbit_text_new(model, NULL, &text, &error) != LOWBIT_OK) ...
 *   if (lowbit_feed(model, text, tokens, count, logits, &error) != LOWBIT_OK) ...
 *   lowbit_seed(&random, 7);
 *   if (lowbit_sample(logits, vocabulary, NULL, &random, &token, &error) != LOWBIT_OK) ...
 */
#ifndef LOWBIT_LOWBIT_H
#define LOWBIT_LOWBIT_H

#include <stddef.h>
#include <stdint.h>

#if defined(LOWBIT_BUILDING) && defined(_WIN32)
#define LOWBIT_C_API __declspec(dllexport)
#elif defined(__GNUC__)
#define LOWBIT_C_API __attribute__((visibility("default")))
#else
#define LOWBIT_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lowbit_model lowbit_model;
typedef struct lowbit_text lowbit_text;

typedef enum {
  LOWBIT_OK = 0,
  LOWBIT_INVALID = 1,      /* an argument or a file */
  LOWBIT_OUT_OF_RANGE = 2, /* a text that does not fit, an index */
  LOWBIT_NO_MEMORY = 3,
  LOWBIT_SYSTEM = 4 /* a file that does not open, threads that do not start */
} lowbit_result;

typedef struct {
  char message[320];
} lowbit_error;

/* How keys and values are kept. With I8 and I4 each position of a head has a scale. */
typedef enum {
  LOWBIT_TEXT_F32 = 0,
  LOWBIT_TEXT_BF16 = 1,
  LOWBIT_TEXT_F16 = 2,
  LOWBIT_TEXT_I8 = 3,
  LOWBIT_TEXT_I4 = 4
} lowbit_cache;

/* Options begin with their size, sizeof of the struct, so that later versions can add fields. Zeros are defaults. */
typedef struct {
  size_t size;
  int threads; /* 0: one for each fast core that the process may use */
  /* Threads of the caller: calls task(context, i) once for each i from 0 to count - 1, in any order, on any threads, and
   * returns when all are done. `count` is at most `threads`; tasks do not wait for each other. NULL: threads of the library. */
  void (*run_tasks)(void* host, int count, void (*task)(void* context, int index), void* context);
  void* host;
} lowbit_open_options;

typedef struct {
  size_t size;
  int64_t length; /* tokens that fit; 0: 2048, or the model's positions if they are fewer */
  lowbit_cache keys, values; /* the same, or LOWBIT_TEXT_I8 and LOWBIT_TEXT_I4 */
} lowbit_text_options;

/* The state of random numbers, those of numpy.random.Generator(PCG64(seed)). */
typedef struct {
  uint64_t state[4];
} lowbit_random;

/* How a token is drawn. The same logits, options and random state give the same token on every machine. */
typedef struct {
  size_t size;
  double temperature; /* 0: the most likely token */
  int64_t top_k;      /* only the k most likely tokens, and those equal to the last of them; 0: all */
  double top_p;       /* of these, only the most likely ones that together reach this probability; 0: all */
  double min_p;       /* of these, only those with at least this part of the largest probability */
} lowbit_sampling;

/* The number of this interface. Functions are only added to it. */
LOWBIT_C_API int lowbit_api_version(void);

/* Opens lowbit.plan in a directory, or a plan's file of another name. */
LOWBIT_C_API lowbit_result lowbit_open(const char* path, const lowbit_open_options* options, lowbit_model** model,
                                       lowbit_error* error);
LOWBIT_C_API void lowbit_close(lowbit_model* model); /* NULL is allowed */

/* These give 0 for a model that is not open. */
LOWBIT_C_API int64_t lowbit_vocabulary(const lowbit_model* model);
LOWBIT_C_API int64_t lowbit_positions(const lowbit_model* model); /* of the longest text */
/* The tokens that end a text: returns how many there are, and writes up to `most` of them. */
LOWBIT_C_API size_t lowbit_stop_tokens(const lowbit_model* model, int64_t* tokens, size_t most);

LOWBIT_C_API lowbit_result lowbit_text_new(const lowbit_model* model, const lowbit_text_options* options, lowbit_text** text,
                                           lowbit_error* error);
LOWBIT_C_API void lowbit_text_free(lowbit_text* text); /* NULL is allowed */
/* These give 0 for a text that is not open. */
LOWBIT_C_API int64_t lowbit_text_length(const lowbit_text* text);   /* tokens that fit */
LOWBIT_C_API int64_t lowbit_text_position(const lowbit_text* text); /* tokens that it has */
LOWBIT_C_API int lowbit_text_recurrent(const lowbit_text* text);    /* 1: its model has states, which cannot be cut back */
/* Writes up to `most` tokens of a text; returns how many it has. */
LOWBIT_C_API size_t lowbit_text_tokens(const lowbit_text* text, int64_t* tokens, size_t most);
/* Continues after the first `count` tokens. Texts of models with states can only go back to 0. */
LOWBIT_C_API lowbit_result lowbit_text_cut(lowbit_text* text, int64_t count, lowbit_error* error);
/* Writes a text and its caches to a file, so that it need not be computed again. The file is replaced when all is written. */
LOWBIT_C_API lowbit_result lowbit_text_save(const lowbit_text* text, const char* file, lowbit_error* error);
/* Replaces a text by one that was saved with the same model and types of caches; its length may be another. After an error the
 * text is as before. */
LOWBIT_C_API lowbit_result lowbit_text_load(lowbit_text* text, const char* file, lowbit_error* error);

/* Adds tokens to a text. logits [vocabulary] are those after the last of them. */
LOWBIT_C_API lowbit_result lowbit_feed(lowbit_model* model, lowbit_text* text, const int64_t* tokens, int64_t count,
                                       float* logits, lowbit_error* error);
/* Embeddings, or scores of pairs, by the plan of an encoder. `ids` has the tokens of all texts, `lengths` how many each text
 * has. `types` has the kind of each token, as 1 for the second text of a pair, or is NULL: all are 0. Writes `texts` vectors,
 * one after the other. */
LOWBIT_C_API int64_t lowbit_width(const lowbit_model* model); /* of a vector; 0: not an encoder */
LOWBIT_C_API lowbit_result lowbit_embed(lowbit_model* model, const int64_t* ids, const int64_t* types, const int64_t* lengths,
                                        int64_t texts, float* vectors, lowbit_error* error);
/* The first token with the largest logit; -1 if one is NaN or the largest is infinite. */
LOWBIT_C_API int64_t lowbit_most_likely(const float* logits, int64_t vocabulary);
LOWBIT_C_API void lowbit_seed(lowbit_random* random, uint64_t seed);
/* Draws a token, as `lowbit generate` does with the same seed. `random` is changed by each draw; at temperature 0 it needs no
 * seed. */
LOWBIT_C_API lowbit_result lowbit_sample(const float* logits, int64_t vocabulary, const lowbit_sampling* options,
                                         lowbit_random* random, int64_t* token, lowbit_error* error);

/* A digest of the logits of a fixed text, the same on every machine for the same files. */
LOWBIT_C_API lowbit_result lowbit_certify(lowbit_model* model, uint64_t* certificate, lowbit_error* error);

/* Texts to tokens and back, by lowbit.tokens in a directory, or a file of another name. Several threads may use one tokenizer.
 * Functions write up to `most` tokens or bytes, and set `count` to the whole number, so that a call with `most` 0 returns only
 * the size. Texts are UTF-8. */
typedef struct lowbit_tokenizer lowbit_tokenizer;

LOWBIT_C_API lowbit_result lowbit_tokenizer_open(const char* path, lowbit_tokenizer** tokenizer, lowbit_error* error);
LOWBIT_C_API void lowbit_tokenizer_close(lowbit_tokenizer* tokenizer); /* NULL is allowed */
/* special: 1 adds the tokens that the tokenizer puts around each text. */
LOWBIT_C_API lowbit_result lowbit_encode(const lowbit_tokenizer* tokenizer, const char* text, size_t bytes, int special,
                                         int64_t* tokens, size_t most, size_t* count, lowbit_error* error);
/* plain: 1 omits special tokens. The text does not end with a zero byte. */
LOWBIT_C_API lowbit_result lowbit_decode(const lowbit_tokenizer* tokenizer, const int64_t* tokens, size_t token_count,
                                         int plain, char* text, size_t most, size_t* count, lowbit_error* error);
/* The tokens of a conversation up to the answer. `system` may be NULL; `messages` are the user's and the model's in turn. */
LOWBIT_C_API lowbit_result lowbit_chat(const lowbit_tokenizer* tokenizer, const char* system, const char* const* messages,
                                       size_t message_count, int64_t* tokens, size_t most, size_t* count, lowbit_error* error);

#ifdef __cplusplus
}
#endif

#endif
