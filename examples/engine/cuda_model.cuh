// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cublas_v2.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <kvire/exec/cuda/stream.hpp>

#include "model.hpp"

namespace engine::gpu {

/// Rows of every matrix product. One shape and so one algorithm for all: the bits of a row do not depend on how many rows a step has, nor on
/// which of the products it is in.
inline constexpr int product_rows = 64;

constexpr std::int64_t padded_rows(std::int64_t rows) { return (rows + product_rows - 1) / product_rows * product_rows; }

/// Memory of the device or pinned memory of the host, kept and grown from step to step.
class CudaBuffer {
 public:
  explicit CudaBuffer(bool pinned = false) : pinned_(pinned) {}
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  ~CudaBuffer() { release(); }

  /// At least so many bytes, zero when they are new; what was there is lost when it grows, so nothing queued may use it then.
  kvire::Status at_least(std::size_t bytes, const char* what) {
    if (bytes <= bytes_) return {};
    release();
    const std::size_t wanted = bytes + bytes / 2;
    cudaError_t e = pinned_ ? cudaMallocHost(&memory_, wanted) : cudaMalloc(&memory_, wanted);
    if (e == cudaSuccess) {
      bytes_ = wanted;
      if (pinned_) {
        std::memset(memory_, 0, wanted);
      } else {
        e = cudaMemset(memory_, 0, wanted);
        // Streams of their own do not wait for that.
        if (e == cudaSuccess) e = cudaStreamSynchronize(cudaStreamLegacy);
      }
    }
    return kvire::detail::cuda_status(e, what);
  }
  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  void release() {
    if (memory_ != nullptr) (void)(pinned_ ? cudaFreeHost(memory_) : cudaFree(memory_));
    memory_ = nullptr;
    bytes_ = 0;
  }
  bool pinned_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A matrix in device memory, [inputs][outputs].
struct DeviceMatrix {
  const float* data = nullptr;
  int inputs = 0;
  int outputs = 0;
};

struct DeviceCompressor {
  DeviceMatrix project;
  const float* bias = nullptr;
  const float* gain = nullptr;
};

/// The weights of a layer in device memory; see Layer.
struct DeviceLayer {
  const float* norm = nullptr;
  DeviceMatrix q, kv, out;
  const float* kv_gain = nullptr;
  DeviceCompressor compressor, index_compressor;
  DeviceMatrix index_q, index_weight;
};

/// The model on a device, and its matrix products by cuBLAS on one stream.
class DeviceModel {
 public:
  static kvire::Result<std::unique_ptr<DeviceModel>> make(const Model& model, const kvire::Stream<kvire::Cuda>& stream) {
    std::unique_ptr<DeviceModel> self(new DeviceModel);
    self->upload(model);
    if (self->status_.ok()) self->status_ = kvire::detail::cuda_status(cudaStreamSynchronize(cudaStreamLegacy), "uploading the weights");
    if (!self->status_.ok()) return self->status_.error();
    // The stream first: naming it gives the handle its own workspace back. With a workspace of fixed size, what is captured is what is run eagerly.
    constexpr std::size_t workspace = std::size_t(32) << 20;
    if (auto status = self->workspace_.at_least(workspace, "the workspace of cuBLAS"); !status.ok()) return status.error();
    for (const cublasStatus_t s : {cublasCreate(&self->handle_), cublasSetStream(self->handle_, stream.native()),
                                   cublasSetWorkspace(self->handle_, self->workspace_.data(), workspace), cublasSetMathMode(self->handle_, CUBLAS_PEDANTIC_MATH)}) {
      if (s != CUBLAS_STATUS_SUCCESS) return cublas_error(s, "preparing cuBLAS");
    }
    return kvire::Result<std::unique_ptr<DeviceModel>>(std::move(self));
  }
  ~DeviceModel() {
    if (handle_ != nullptr) (void)cublasDestroy(handle_);
  }

  const Model& host() const { return *host_; }
  const DeviceLayer& layer(int l) const { return layers_[static_cast<std::size_t>(l)]; }
  const float* embedding = nullptr;
  const float* norm = nullptr;
  DeviceMatrix head;
  const float* cos = nullptr;
  const float* sin = nullptr;

  /// out[row][m.outputs] = x[row][m.inputs] * m for `rows` rows, rounded up to whole products: both have room for padded_rows(rows).
  kvire::Status project(const DeviceMatrix& m, const float* x, std::int64_t rows, float* out) const {
    const float one = 1;
    const float zero = 0;
    for (std::int64_t r = 0; r < rows; r += product_rows) {
      // cuBLAS counts by columns: the transposes of all three.
      const cublasStatus_t s = cublasSgemm(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m.outputs, product_rows, m.inputs, &one, m.data, m.outputs, x + r * m.inputs, m.inputs,
                                           &zero, out + r * m.outputs, m.outputs);
      if (s != CUBLAS_STATUS_SUCCESS) return cublas_error(s, "a matrix product");
    }
    return {};
  }

 private:
  DeviceModel() = default;

  static kvire::Error cublas_error(cublasStatus_t status, const char* what) {
    return {kvire::ErrorCode::failed, std::string(what) + ": " + cublasGetStatusName(status)};
  }

  void upload(const Model& model) {
    host_ = &model;
    embedding = vector(model.embedding);
    norm = vector(model.norm);
    head = matrix(model.head);
    cos = vector(model.cos);
    sin = vector(model.sin);
    for (const Layer& from : model.layers) {
      DeviceLayer to;
      to.norm = vector(from.norm);
      to.q = matrix(from.q);
      to.kv = matrix(from.kv);
      to.out = matrix(from.out);
      to.kv_gain = vector(from.kv_gain);
      to.compressor = compressor(from.compressor);
      to.index_compressor = compressor(from.index_compressor);
      to.index_q = matrix(from.index_q);
      to.index_weight = matrix(from.index_weight);
      layers_.push_back(to);
    }
  }
  const float* vector(const std::vector<float>& from) {
    if (from.empty() || !status_.ok()) return nullptr;
    auto& memory = *memory_.emplace_back(std::make_unique<CudaBuffer>());
    status_ = memory.at_least(from.size() * sizeof(float), "memory for the weights");
    if (!status_.ok()) return nullptr;
    cudaError_t e = cudaMemcpy(memory.data(), from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice);
    if (e == cudaSuccess) e = cudaStreamSynchronize(cudaStreamLegacy);  // few bytes may still be on their way
    status_ = kvire::detail::cuda_status(e, "uploading the weights");
    return reinterpret_cast<const float*>(memory.data());
  }
  DeviceMatrix matrix(const Matrix& from) {
    std::vector<float> rows(from.packed.size());
    const auto inputs = static_cast<std::size_t>(from.inputs);
    const auto outputs = static_cast<std::size_t>(from.outputs);
    for (std::size_t k = 0; k < inputs; ++k) {
      for (std::size_t o = 0; o < outputs; ++o) rows[k * outputs + o] = from.packed[(o / Matrix::strip * inputs + k) * Matrix::strip + o % Matrix::strip];
    }
    return {vector(rows), from.inputs, from.outputs};
  }
  DeviceCompressor compressor(const Compressor& from) { return {matrix(from.project), vector(from.bias), vector(from.gain)}; }

  const Model* host_ = nullptr;
  std::vector<DeviceLayer> layers_;
  std::vector<std::unique_ptr<CudaBuffer>> memory_;
  CudaBuffer workspace_;
  kvire::Status status_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace engine::gpu
