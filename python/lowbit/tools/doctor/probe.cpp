// What `lowbit doctor` compiles: a packed matrix and a row of activations from files, the product to stdout.
//   probe PACKED X OUT_FEATURES
#include <lowbit/ops/operators.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

static std::vector<char> read_file(const char* path) {
  std::vector<char> bytes;
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) return bytes;
  for (int next; (next = std::fgetc(file)) != EOF;) bytes.push_back(static_cast<char>(next));
  std::fclose(file);
  return bytes;
}

// A matrix of one row, or a vector.
static lowbit::TensorView view(void* data, lowbit::ElementType type, int ndim, int64_t size) {
  lowbit::TensorView tensor;
  tensor.data = data;
  tensor.type = type;
  tensor.shape.ndim = ndim;
  tensor.shape.size[0] = 1;
  tensor.stride[0] = size;
  tensor.shape.size[ndim - 1] = size;
  tensor.stride[ndim - 1] = 1;
  return tensor;
}

int main(int count, char** arguments) {
  if (count != 4) return 2;
  std::vector<char> packed = read_file(arguments[1]), x = read_file(arguments[2]);
  std::vector<float> y(static_cast<size_t>(std::atoi(arguments[3])));
  const auto n = static_cast<int64_t>(y.size());
  const lowbit::Status status = lowbit::linear(
      view(x.data(), lowbit::ElementType::f32, 2, static_cast<int64_t>(x.size() / sizeof(float))),
      view(packed.data(), lowbit::ElementType::u8, 1, static_cast<int64_t>(packed.size())), n,
      view(y.data(), lowbit::ElementType::f32, 2, n), lowbit::Parallel());
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message());
    return 1;
  }
  std::fwrite(y.data(), sizeof(float), y.size(), stdout);
  return 0;
}
