// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmarks/support/device_timing.cuh>

#include <cmath>

// What benchmarks of logits have in common: inputs in device memory, and single logits in float64.

namespace kvire_bench {

/// Device memory that lives as long as this.
class Inputs {
 public:
  Inputs() = default;
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;
  ~Inputs() {
    for (void* p : memory_) cudaFree(p);
  }
  template <class T>
  T* array(std::int64_t n) {
    T* p = device_array<T>(n);
    memory_.push_back(p);
    return p;
  }
  template <class T>
  T* upload(const std::vector<T>& v) {
    T* p = array<T>(static_cast<std::int64_t>(v.size()));
    KVIRE_BENCH_CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }

 private:
  std::vector<void*> memory_;
};

template <class T>
std::vector<T> fetch(const T* from, std::size_t n) {
  std::vector<T> v(n);
  KVIRE_BENCH_CHECK(cudaMemcpy(v.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

/// Numbers spread evenly over [from, to).
static __global__ void fill_floats(float* x, long long n, float from, float to, std::uint32_t seed) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
    x[i] = from + (to - from) * 0x1p-32F * static_cast<float>(mix(static_cast<std::uint64_t>(i) + (static_cast<std::uint64_t>(seed) << 40)));
}

struct ExactLogit {
  double logit = 0;
  double magnitude = 0;  // the sum of |weight| * scale * |query . key| terms, which tolerances are relative to
};
/// `query(h, d)` and `key(d)` are elements.
template <class Query, class Key>
ExactLogit exact_logit(const std::vector<float>& weights, int dim, double scale, Query&& query, Key&& key) {
  ExactLogit sum;
  for (std::size_t h = 0; h < weights.size(); ++h) {
    double dot = 0, all = 0;
    for (int d = 0; d < dim; ++d) {
      const double term = query(static_cast<int>(h), d) * key(d);
      dot += term;
      all += std::fabs(term);
    }
    sum.logit += weights[h] * std::max(dot, 0.0) * scale;
    sum.magnitude += std::fabs(weights[h]) * all * scale;
  }
  return sum;
}

}  // namespace kvire_bench
