// The kernel of all collectives.
//
// TensorFlow calls it in one of two ways. In a graph, ComputeAsync() passes the tensors' memory to the engine and
// returns; `done` is called when the engine has finished. So no thread of TensorFlow waits, in whatever order each rank
// reaches its operations. In eager mode, the thread that calls Compute() has nothing else to do. It waits and meanwhile
// runs the engine itself, because otherwise a small operation would cost two switches between threads. Where there are
// GPUs, eager ops are in functions, and so run as in a graph: see calls.py.
//
// On a GPU both complete when all work has been enqueued on the device and TensorFlow's stream waits for it. That is
// before the results are valid, as with TensorFlow's own kernels. And as with those, the tensors' memory may be freed
// at once: TensorFlow has one stream for all kernels of a device, so the next kernel that uses the memory is on a
// stream that waits. Copies to and from the host are on other streams, and TensorFlow makes them wait for that stream.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "completions.h"
#include "hvl.h"
#include "rank_info.h"
#include "requests.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

namespace horovodlike_tensorflow {

using absl::Status;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The stream on which TensorFlow runs the kernels of a GPU. It is found through TensorFlow's own headers alone, so that
// the ops can be compiled without the headers of CUDA.
struct GpuStream {
  int32_t device = -1;     // the driver's number of the GPU in this process; TensorFlow's number may be another
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

class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  CollectiveKernel(OpKernelConstruction* construction, int32_t kind) : AsyncOpKernel(construction) {
    common_.kind = kind;
    is_eager_ = !construction->HasAttr("description");
    if (!is_eager_) OP_REQUIRES_OK(construction, construction->GetAttr("description", &encoded_));
    if (kind == HVL_BARRIER || kind == HVL_JOIN) return;  // these have no tensors
    const bool is_on_gpu = construction->device_type() == tensorflow::DeviceType(tensorflow::DEVICE_GPU);
    common_.device = is_on_gpu ? HVL_CUDA : HVL_CPU;
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    auto call = std::make_unique<Call>(this, context);
    call->done = std::move(done);
    const hvl_callbacks callbacks{&CollectiveKernel::completed, &CollectiveKernel::allocate, call.get()};
    int64_t ignored = 0;
    const Status status = start(call.get(), callbacks, &ignored);
    if (status.ok()) {
      call.release();  // completed() owns it now
      return;
    }
    context->SetStatus(status);
    DoneCallback refused = std::move(call->done);
    call.reset();
    refused();
  }

  void Compute(OpKernelContext* context) final {
    Call call(this, context);
    const hvl_callbacks callbacks{nullptr, &CollectiveKernel::allocate, &call};
    int64_t handle = 0;
    Status status = start(&call, callbacks, &handle);
    if (status.ok()) status = wait(handle, call.gpu);
    if (!status.ok()) context->SetStatus(status);  // not OP_REQUIRES_OK, which an AsyncOpKernel must not use
  }

 private:
  // One execution of a kernel, from its start until the engine has finished it.
  struct Call {
    Call(CollectiveKernel* kernel_of_call, OpKernelContext* context_of_call)
        : kernel(kernel_of_call), context(context_of_call) {}
    ~Call() {
      if (number >= 0) Numbers::shared().give_back(operation->description, number);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    CollectiveKernel* const kernel;
    OpKernelContext* const context;
    DoneCallback done;
    OperationPtr operation;
    int number = -1;  // of an unnamed operation; else -1
    Tensors tensors;  // the inputs, without splits and description
    GpuStream gpu;    // of the tensors, if they are on a GPU
  };

  Status start(Call* call, const hvl_callbacks& callbacks, int64_t* handle) {
    OpKernelContext* context = call->context;
    const bool has_splits = common_.kind == HVL_ALLTOALL;
    const int num_tensors = context->num_inputs() - (has_splits ? 1 : 0) - (is_eager_ ? 1 : 0);
    {
      const Status status = find_operation(context, &call->operation);
      if (!status.ok()) return status;
    }
    const Description& description = call->operation->description;
    std::vector<int64_t> arguments;
    if (description.device == HVL_CUDA) {
      const Status status = find_stream(context, &call->gpu);
      if (!status.ok()) return status;
    }
    for (int t = 0; t < num_tensors; ++t) call->tensors.push_back(context->input(t));
    if (has_splits) {
      const Status status = read_splits(description, context->input(num_tensors), call->tensors[0], &arguments);
      if (!status.ok()) return status;
    }
    std::vector<uintptr_t> inputs, outputs;
    if (description.numbered) call->number = Numbers::shared().take(description);
    const Prepared prepared = call->operation->requests.get(description, call->number, call->tensors, arguments);
    if (prepared == nullptr) return to_status(HVL_INVALID_ARGUMENT, hvl_last_error());
    for (const Tensor& tensor : call->tensors) inputs.push_back(address_of(tensor));
    for (int t = 0; t < num_tensors; ++t) {
      Tensor* output = nullptr;
      const Status status = make_output(call, t, &output);
      if (!status.ok()) return status;
      if (output != nullptr) outputs.push_back(address_of(*output));
    }
    *handle = description.device == HVL_CUDA ? hvl_enqueue_on_stream(prepared.get(), inputs.data(), outputs.data(),
                                                                     &callbacks, call->gpu.device, call->gpu.stream)
                                             : hvl_enqueue(prepared.get(), inputs.data(), outputs.data(), &callbacks);
    return *handle < 0 ? refused(static_cast<int32_t>(-*handle), hvl_last_error()) : Status();
  }

  // Adds to the engine's message what to do in a graph, where a script cannot wait for a result.
  Status refused(int32_t status, std::string message) const {
    if (!is_eager_ && absl::StrContains(message, "is already in flight")) {
      message +=
          ". In a graph: put tf.control_dependencies between the two, or, if they are iterations of a loop, "
          "tf.autograph.experimental.set_loop_options(parallel_iterations=1) into it";
    }
    return to_status(status, message.c_str());
  }

  Status find_operation(OpKernelContext* context, OperationPtr* operation) {
    const tensorflow::tstring& encoded =
        is_eager_ ? context->input(context->num_inputs() - 1).scalar<tensorflow::tstring>()() : encoded_;
    *operation = operations_.get(std::string_view(encoded.data(), encoded.size()), common_);
    if (*operation != nullptr) return Status();
    return absl::InvalidArgumentError(absl::StrCat("no description of a collective: ", encoded));
  }

  Status wait(int64_t handle, const GpuStream& gpu) const {
    constexpr double kSlice = 10.0;  // seconds; a signal ends a wait early as well
    int32_t status = HVL_IN_PROGRESS;
    while (status == HVL_IN_PROGRESS) {
      status = common_.device == HVL_CUDA ? hvl_wait_on_stream(handle, kSlice, nullptr, nullptr, gpu.stream)
                                          : hvl_wait(handle, kSlice, nullptr, nullptr);
    }
    return to_status(status, hvl_last_error());
  }

  // Leaves `*output` null if its size is not known yet: then the engine calls allocate() later.
  Status make_output(Call* call, int index, Tensor** output) const {
    const TensorShape shape = call->tensors[static_cast<size_t>(index)].shape();
    const Description& description = call->operation->description;
    if (description.kind == HVL_ALLREDUCE || description.kind == HVL_BROADCAST) {
      call->tensors[static_cast<size_t>(index)] = Tensor();  // a second reference would prevent reuse of the memory
      return call->context->forward_input_or_allocate_output({index}, index, shape, output);
    }
    if (description.kind != HVL_REDUCESCATTER) return Status();
    Membership membership;
    if (!Job::current().find(description.process_set, &membership) || membership.place < 0) {
      return absl::InvalidArgumentError(absl::StrCat("reducescatter '", description.name, "': process set ",
                                                     description.process_set,
                                                     " does not exist, or this rank is not a member of it"));
    }
    TensorShape own = shape;
    own.set_dim(0, (shape.dim_size(0) + membership.size - 1 - membership.place) / membership.size);
    return call->context->allocate_output(index, own, output);
  }

  Status read_splits(const Description& description, const Tensor& splits, const Tensor& tensor,
                     std::vector<int64_t>* arguments) const {
    if (splits.dims() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("alltoall '", description.name, "': splits must have one dimension, got ", splits.dims()));
    }
    Membership membership;
    const bool known = Job::current().find(description.process_set, &membership);
    for (int64_t i = 0; i < splits.NumElements(); ++i) {
      arguments->push_back(splits.dtype() == tensorflow::DT_INT32 ? splits.flat<int32_t>()(i)
                                                                  : splits.flat<int64_t>()(i));
    }
    if (!known || tensor.dims() == 0) return Status();  // the engine returns the error
    if (arguments->empty()) {                           // the same number of rows for each rank
      const int64_t rows = tensor.dim_size(0);
      if (rows % membership.size != 0) {
        return absl::InvalidArgumentError(absl::StrCat("alltoall '", description.name, "': without splits the ", rows,
                                                       " rows must be a multiple of the number of ranks, ",
                                                       membership.size));
      }
      arguments->assign(static_cast<size_t>(membership.size), rows / membership.size);
    }
    if (arguments->size() != static_cast<size_t>(membership.size)) {
      return absl::InvalidArgumentError(absl::StrCat("alltoall '", description.name, "' has ", arguments->size(),
                                                     " splits for ", membership.size, " ranks"));
    }
    return Status();
  }

  // Called by the engine. TensorFlow knows from ops.cc which outputs are in host memory.
  static void* allocate(void* context, int32_t index, const hvl_output* described) {
    auto* call = static_cast<Call*>(context);
    TensorShape shape;
    if (call->kernel->common_.kind != HVL_JOIN) {
      const bool is_of_rows = static_cast<size_t>(index) < call->tensors.size();
      shape = is_of_rows ? call->tensors[static_cast<size_t>(index)].shape() : TensorShape({0});
      shape.set_dim(0, described->shape[0]);
    }
    Tensor* output = nullptr;
    if (!call->context->allocate_output(index, shape, &output).ok()) return nullptr;
    return reinterpret_cast<void*>(address_of(*output));
  }

  // Called by the engine.
  static void completed(void* context, int32_t status, const char* message) {
    std::unique_ptr<Call> call(static_cast<Call*>(context));
    if (status != HVL_OK) call->context->SetStatus(to_status(status, message));
    DoneCallback done = std::move(call->done);
    call.reset();  // before `done`: the kernel may be destroyed after it
    Completions::shared().add(std::move(done));
  }

  Description common_;           // the part that all operations of this kernel share
  bool is_eager_ = false;        // true: the description is the last input
  tensorflow::tstring encoded_;  // the description if it is an attribute
  Operations operations_;
};

}  // namespace horovodlike_tensorflow
