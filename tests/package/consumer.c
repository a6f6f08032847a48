/* Uses the C interface without a model: draws a token, and gets a sentence for a file that does not exist. */
#include <lowbit/plan/lowbit.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  const float logits[4] = {0.5f, 2.0f, -1.0f, 1.0f};
  lowbit_sampling sampling;
  lowbit_error error;
  lowbit_model* model = NULL;
  lowbit_random random;
  int64_t token = -1;
  memset(&sampling, 0, sizeof sampling);
  sampling.size = sizeof sampling;
  sampling.temperature = 0.5;
  sampling.top_k = 1;
  lowbit_seed(&random, 7);
  if (lowbit_sample(logits, 4, &sampling, &random, &token, &error) != LOWBIT_OK || token != 1) {
    fprintf(stderr, "a token was not drawn: %s\n", error.message);
    return 1;
  }
  if (lowbit_open("no such file", NULL, &model, &error) != LOWBIT_SYSTEM || strstr(error.message, "no such file") == NULL) {
    fprintf(stderr, "another error was expected: %s\n", error.message);
    return 1;
  }
  printf("version %d of the interface\n", lowbit_api_version());
  return 0;
}
