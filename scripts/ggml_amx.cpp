// Multiplies a Q4_0 matrix by float rows in ggml, with its AMX buffer and with its plain one, for scripts/ggml_amx.sh.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

static std::vector<float> product(ggml_backend_t cpu, ggml_backend_buffer_type_t type, const std::vector<uint8_t>& w,
                                  const std::vector<float>& x, int k, int n, int m) {
  ggml_init_params params{ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true};
  ggml_context* weights = ggml_init(params);
  ggml_tensor* const a = ggml_new_tensor_2d(weights, GGML_TYPE_Q4_0, k, n);
  ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights, type);
  if (buffer == nullptr) {
    std::puts("ggml could not allocate a buffer");
    std::exit(2);
  }
  ggml_backend_tensor_set(a, w.data(), 0, w.size());
  ggml_context* rest = ggml_init(params);
  ggml_tensor* b = ggml_new_tensor_2d(rest, GGML_TYPE_F32, k, m);
  ggml_tensor* c = ggml_mul_mat(rest, a, b);
  ggml_backend_buffer_t other = ggml_backend_alloc_ctx_tensors(rest, cpu);
  ggml_backend_tensor_set(b, x.data(), 0, x.size() * 4);
  ggml_cgraph* graph = ggml_new_graph(rest);
  ggml_build_forward_expand(graph, c);
  if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) {
    std::puts("ggml could not compute the product");
    std::exit(2);
  }
  std::vector<float> out(static_cast<size_t>(n) * m);
  ggml_backend_tensor_get(c, out.data(), 0, out.size() * 4);
  ggml_backend_buffer_free(other);
  ggml_backend_buffer_free(buffer);
  ggml_free(rest);
  ggml_free(weights);
  return out;
}

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  ggml_backend_dev_t device = ggml_backend_get_device(cpu);
  const auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  ggml_backend_buffer_type_t amx = nullptr;
  for (ggml_backend_buffer_type_t* each = get(device); each && *each; ++each) {
    if (std::strcmp(ggml_backend_buft_name(*each), "AMX") == 0) amx = *each;
  }
  if (amx == nullptr) {
    std::puts("ggml offers no AMX buffer on this CPU");
    return 2;
  }
  constexpr int k = 256, n = 64;
  std::vector<float> w(static_cast<size_t>(k) * n);
  unsigned state = 1;
  const auto random = [&state] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.f - 1;
  };
  for (float& each : w) each = random();
  std::vector<uint8_t> packed(ggml_row_size(GGML_TYPE_Q4_0, k) * n);
  ggml_quantize_chunk(GGML_TYPE_Q4_0, w.data(), packed.data(), 0, n, k, nullptr);
  int bad = 0;
  for (int m : {1, 2, 16, 33}) {  // one row does not use tiles
    std::vector<float> x(static_cast<size_t>(k) * m);
    for (float& each : x) each = random();
    const auto plain = product(cpu, ggml_backend_cpu_buffer_type(), packed, x, k, n, m);
    const auto tiled = product(cpu, amx, packed, x, k, n, m);
    double norm = 0, difference = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      norm += std::pow(plain[i], 2);
      difference += std::pow(tiled[i] - plain[i], 2);
    }
    const double relative = std::sqrt(difference / norm);
    std::printf("rows: %d, AMX differs from plain by %.1e of the norm\n", m, relative);
    bad += !(relative < 1e-6);  // only the order of float sums differs; activations are quantized equally
  }
  return bad;
}
