// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include <kvire/base/result.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// An Error with the runtime's name for `error`. Takes the error off the thread, so that it does not show up in somebody else's call.
inline Error cuda_error(cudaError_t error, const std::string& what) {
  if (cudaPeekAtLastError() == error) (void)cudaGetLastError();
  const ErrorCode code = error == cudaErrorMemoryAllocation ? ErrorCode::exhausted : ErrorCode::failed;
  return {code, what + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")"};
}

/// True for success; `what` is only put together otherwise.
inline Status cuda_status(cudaError_t error, const char* what) { return error == cudaSuccess ? Status() : Status(cuda_error(error, what)); }

/// Makes a device current, and the one before it again at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : wanted_(device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    if (before_ != wanted_ && cudaSetDevice(wanted_) != cudaSuccess) {
      (void)cudaGetLastError();
      wanted_ = before_;
    }
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (before_ >= 0 && before_ != wanted_) (void)cudaSetDevice(before_);
  }

 private:
  int wanted_;
  int before_ = -1;
};

/// Lets the thread ask about events, streams and kernels, make and free memory while another stream of the process is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace detail

/// The current device, or an error with the runtime's reason (no driver, no device).
inline Result<int> current_device() {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return detail::cuda_error(e, "current device");
  return device;
}

KVIRE_NAMESPACE_END
