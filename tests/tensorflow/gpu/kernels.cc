// A kernel that adds one to its input, on a GPU as asynchronously as kernels are: for tests of what comes before and
// after it on TensorFlow's stream.

#include "gpu_double.h"
#include "gpu_stream.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

REGISTER_OP("AddOneOnGpu")
    .Input("before: float")
    .Output("after: float")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

class AddOneKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) final {
    const tensorflow::Tensor& before = context->input(0);
    tensorflow::Tensor* after = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, before.shape(), &after));
    horovodlike_tensorflow::GpuStream gpu;
    OP_REQUIRES_OK(context, horovodlike_tensorflow::find_stream(context, &gpu));
    const auto* from = static_cast<const float*>(before.data());
    auto* to = static_cast<float*>(after->data());
    const int64_t count = before.NumElements();
    gpu_double::compute(gpu.stream, to, count * sizeof(float), [=] {
      for (int64_t i = 0; i < count; ++i) to[i] = from[i] + 1;
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("AddOneOnGpu").Device(tensorflow::DEVICE_GPU), AddOneKernel);
