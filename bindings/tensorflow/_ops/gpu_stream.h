// The stream on which TensorFlow makes the tensors of a GPU kernel. Found with TensorFlow's own headers alone, so that
// compiling the ops does not need CUDA's.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace horovodlike_tensorflow {

struct GpuStream {
  int32_t device = -1;     // as the driver numbers those that the process sees; TensorFlow's own number may be another
  void* stream = nullptr;  // a CUstream
};

// All kernels of a device have the same stream.
inline absl::Status find_stream(tensorflow::OpKernelContext* context, GpuStream* found) {
  const auto* device = context->device()->tensorflow_accelerator_device_info();
  const tensorflow::DeviceContext* kernels = context->op_device_context();
  if (device != nullptr && kernels != nullptr && kernels->stream() != nullptr) {
    found->device = device->gpu_id;
    found->stream = kernels->stream()->platform_specific_handle().stream;
  }
  if (found->stream != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("collectives are for the CPU and for NVIDIA GPUs, and TensorFlow's device ",
                   context->device()->name(), " has no stream of CUDA: put them under tf.device(\"CPU:0\")"));
}

}  // namespace horovodlike_tensorflow
