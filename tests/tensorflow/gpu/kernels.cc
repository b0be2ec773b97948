// A kernel that adds one to its input, on a GPU as asynchronously as kernels are: for tests of what comes before and
// after it on TensorFlow's stream. In TensorFlow's C API, which takes seconds less to compile than that of C++.

#include "tensorflow/c/kernels.h"

#include <cstdint>
#include <vector>

#include "fake_gpu.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"

namespace {

constexpr const char* kName = "AddOneOnGpu";

void keep_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

void add_one(void*, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* before = nullptr;
  TF_GetInput(context, 0, &before, status);
  std::vector<int64_t> shape;
  for (int dim = 0; dim < TF_NumDims(before); ++dim) shape.push_back(TF_Dim(before, dim));
  const size_t num_bytes = TF_TensorByteSize(before);
  TF_Tensor* after =
      TF_AllocateOutput(context, 0, TF_FLOAT, shape.data(), static_cast<int>(shape.size()), num_bytes, status);
  void* stream = TF_GetStream(context, status);
  const auto* from = static_cast<const float*>(TF_TensorData(before));
  auto* to = static_cast<float*>(TF_TensorData(after));
  fake_gpu::compute(stream, to, num_bytes, [=] {
    for (size_t i = 0; i < num_bytes / sizeof(float); ++i) to[i] = from[i] + 1;
  });
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
  TF_DeleteTensor(before);
  TF_DeleteTensor(after);
  TF_DeleteStatus(status);
}

const bool is_registered = [] {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(kName);
  TF_OpDefinitionBuilderAddInput(op, "before: float");
  TF_OpDefinitionBuilderAddOutput(op, "after: float");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, keep_shape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder(kName, "GPU", nullptr, add_one, nullptr);
  TF_RegisterKernelBuilder(kName, kernel, status);
  const bool done = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
  return done;
}();

}  // namespace
