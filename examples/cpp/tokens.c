/* Continues a text in C: tokens MODEL.plan COUNT ID... prints COUNT further token ids. */
#include <lowbit/plan/lowbit.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  lowbit_error error;
  lowbit_model* model = NULL;
  lowbit_text* text = NULL;
  float* logits = NULL;
  int64_t ids[256], next;
  int64_t count = 0;
  int left, status = 1;
  if (argc < 4 || argc - 3 > 256) {
    fprintf(stderr, "usage: tokens MODEL.plan COUNT ID...\n");
    return 2;
  }
  for (; count < argc - 3; ++count) ids[count] = atoll(argv[count + 3]);
  if (lowbit_open(argv[1], NULL, &model, &error) != LOWBIT_OK) goto failed;
  if (lowbit_text_new(model, NULL, &text, &error) != LOWBIT_OK) goto failed;
  logits = malloc(sizeof(float) * (size_t)lowbit_vocabulary(model));
  if (logits == NULL) goto end;
  for (left = atoi(argv[2]); left > 0; --left) {
    if (lowbit_feed(model, text, ids, count, logits, &error) != LOWBIT_OK) goto failed;
    next = lowbit_most_likely(logits, lowbit_vocabulary(model));
    printf("%lld\n", (long long)next);
    ids[0] = next;
    count = 1;
  }
  status = 0;
  goto end;
failed:
  fprintf(stderr, "tokens: %s\n", error.message);
end:
  free(logits);
  lowbit_text_free(text);
  lowbit_close(model);
  return status;
}
