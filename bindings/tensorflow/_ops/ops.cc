// The collectives as ops of TensorFlow, which call the engine's C API. Compiled on first import: see build.py.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "collective.h"
#include "rank_info.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace horovodlike_tensorflow {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

#define HVL_TENSORS "Ts: list(type) >= 1"  // calls.py checks the dtypes

Status same_shapes(InferenceContext* c) {
  for (int t = 0; t < c->num_outputs(); ++t) c->set_output(t, c->input(t));
  return Status();
}

// For an output whose dimension 0 depends on the ranks.
Status other_rows(InferenceContext* c, int tensor) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(tensor), 1, &shape));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  c->set_output(tensor, shape);
  return Status();
}

Status all_other_rows(InferenceContext* c) {
  for (int t = 0; t < c->num_outputs(); ++t) TF_RETURN_IF_ERROR(other_rows(c, t));
  return Status();
}

Status rows_and_splits(InferenceContext* c) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
  c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
  return other_rows(c, 0);
}

}  // namespace

// The arguments of a collective, except its tensors, are one string (see Description). Each collective has two ops. In
// a script's graphs, and when a gradient may be computed, the string is an attribute, which the gradient reads.
// Otherwise it is an input, because each step may use a new name, and TensorFlow never frees the eager kernel of some
// ten KB that it makes for each value of an attribute.
#define HVL_COLLECTIVE(op, ...)                                          \
  REGISTER_OP("Horovodlike" op) __VA_ARGS__.Attr("description: string"); \
  REGISTER_OP("HorovodlikeEager" op) __VA_ARGS__.Input("description: string")

// Collectives of tensors are stateless: TensorFlow knows from the tensors which of them depend on others, and may run
// the rest in any order.
#define HVL_COLLECTIVE_OF_LIST(op, shapes) \
  HVL_COLLECTIVE(op, .Input("tensors: Ts").Output("results: Ts").Attr(HVL_TENSORS).SetShapeFn(shapes))

HVL_COLLECTIVE_OF_LIST("Allreduce", same_shapes);
HVL_COLLECTIVE_OF_LIST("Reducescatter", all_other_rows);
HVL_COLLECTIVE_OF_LIST("Allgather", all_other_rows);
HVL_COLLECTIVE_OF_LIST("Broadcast", same_shapes);

HVL_COLLECTIVE("Alltoall", .Input("tensor: T")
                               .Input("splits: Tsplits")
                               .Output("result: T")
                               .Output("received_splits: int32")
                               .Attr("T: type")
                               .Attr("Tsplits: {int32, int64}")
                               .SetShapeFn(rows_and_splits));

HVL_COLLECTIVE("Barrier", .SetIsStateful().SetShapeFn(tensorflow::shape_inference::NoOutputs));

HVL_COLLECTIVE("Join",
               .Output("last_joined: int64").SetIsStateful().SetShapeFn(tensorflow::shape_inference::ScalarShape));

// Returns `tensors` unchanged. In graphs, collectives get their tensors through this op. Because the anchor is not a
// constant, TensorFlow does not fold a collective of constants into a constant.
REGISTER_OP("HorovodlikeAnchored")
    .Input("tensors: Ts")
    .Input("anchor: int32")
    .Output("same: Ts")
    .Attr(HVL_TENSORS)
    .SetShapeFn(same_shapes);

// Returns `tensor` unchanged, and counts a step: in a graph, one gradient of a step passes through it.
REGISTER_OP("HorovodlikeMarkStep")
    .Input("tensor: T")
    .Output("same: T")
    .Attr("T: type")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

// These are stateful, so that TensorFlow does not fold their values into the graph: the values change with the job.

REGISTER_OP("HorovodlikeRank")
    .Output("rank: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HorovodlikeLocalRank")
    .Output("local_rank: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HorovodlikeLocalSize")
    .Output("local_size: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HorovodlikeSize")
    .Output("size: int32")
    .Attr("process_set: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HorovodlikeProcessSetIncluded")
    .Output("included: int32")
    .Attr("process_set: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

template <int32_t kKind>
class Collective : public CollectiveKernel {
 public:
  explicit Collective(OpKernelConstruction* construction) : CollectiveKernel(construction, kKind) {}
};

// `on_host`: a .HostMemory() for each input and output that a GPU kernel has in host memory. If TensorFlow was built
// without GPUs, the GPU kernels are never used.
#define HVL_KERNELS(op, on_host, ...)                                                          \
  REGISTER_KERNEL_BUILDER(Name("Horovodlike" op).Device(tensorflow::DEVICE_CPU), __VA_ARGS__); \
  REGISTER_KERNEL_BUILDER(Name("Horovodlike" op).Device(tensorflow::DEVICE_GPU) on_host, __VA_ARGS__)

#define HVL_COLLECTIVE_KERNELS(op, on_host, ...) \
  HVL_KERNELS(op, on_host, __VA_ARGS__);         \
  HVL_KERNELS("Eager" op, on_host.HostMemory("description"), __VA_ARGS__)

HVL_COLLECTIVE_KERNELS("Allreduce", , Collective<HVL_ALLREDUCE>);
HVL_COLLECTIVE_KERNELS("Reducescatter", , Collective<HVL_REDUCESCATTER>);
HVL_COLLECTIVE_KERNELS("Allgather", , Collective<HVL_ALLGATHER>);
HVL_COLLECTIVE_KERNELS("Broadcast", , Collective<HVL_BROADCAST>);
HVL_COLLECTIVE_KERNELS("Alltoall", .HostMemory("splits").HostMemory("received_splits"), Collective<HVL_ALLTOALL>);
HVL_COLLECTIVE_KERNELS("Barrier", , Collective<HVL_BARRIER>);
HVL_COLLECTIVE_KERNELS("Join", .HostMemory("last_joined"), Collective<HVL_JOIN>);

class AnchoredKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    for (int t = 0; t < context->num_outputs(); ++t) context->set_output(t, context->input(t));
  }
  bool IsExpensive() final { return false; }
};

HVL_KERNELS("Anchored", .HostMemory("anchor"), AnchoredKernel);

// The steps since init(), and when the first and the last one were marked.
struct Steps {
  std::atomic<int64_t> count{0};
  std::atomic<int64_t> first{0};  // nanoseconds of a monotonic clock
  std::atomic<int64_t> last{0};

  void mark() {
    const int64_t now = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    if (count.fetch_add(1) == 0) first.store(now);
    last.store(now);
  }
};

Steps marked_steps;

class MarkStepKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    marked_steps.mark();
    context->set_output(0, context->input(0));
  }
  bool IsExpensive() final { return false; }
};

HVL_KERNELS("MarkStep", , MarkStepKernel);

// The kernel of an op that returns an integer of the current job, read when the op runs.
class NumberKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    const Place place = Job::current().place();
    OP_REQUIRES(context, place.rank >= 0,
                absl::FailedPreconditionError("horovodlike has not been initialized; use hvd.init()."));
    int32_t number = 0;
    OP_REQUIRES_OK(context, get(place, &number));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<int32_t>()() = number;
  }

 private:
  virtual Status get(const Place& place, int32_t* number) const = 0;
};

class RankKernel : public NumberKernel {
  using NumberKernel::NumberKernel;
  Status get(const Place& place, int32_t* number) const final {
    *number = place.rank;
    return Status();
  }
};

class LocalRankKernel : public NumberKernel {
  using NumberKernel::NumberKernel;
  Status get(const Place& place, int32_t* number) const final {
    *number = place.local_rank;
    return Status();
  }
};

class LocalSizeKernel : public NumberKernel {
  using NumberKernel::NumberKernel;
  Status get(const Place& place, int32_t* number) const final {
    *number = place.local_size;
    return Status();
  }
};

class ProcessSetKernel : public NumberKernel {
 public:
  explicit ProcessSetKernel(OpKernelConstruction* construction) : NumberKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set", &process_set_));
  }

 protected:
  Status find(Membership* membership) const {
    if (Job::current().find(process_set_, membership)) return Status();
    return absl::InvalidArgumentError(absl::StrCat("process set ", process_set_, " does not exist (any more)"));
  }

 private:
  int32_t process_set_ = 0;
};

class SizeKernel : public ProcessSetKernel {
  using ProcessSetKernel::ProcessSetKernel;
  Status get(const Place&, int32_t* number) const final {
    Membership membership;
    TF_RETURN_IF_ERROR(find(&membership));
    *number = membership.size;
    return Status();
  }
};

class IncludedKernel : public ProcessSetKernel {
  using ProcessSetKernel::ProcessSetKernel;
  Status get(const Place&, int32_t* number) const final {
    Membership membership;
    TF_RETURN_IF_ERROR(find(&membership));
    *number = membership.place >= 0 ? 1 : 0;
    return Status();
  }
};

HVL_KERNELS("Rank", .HostMemory("rank"), RankKernel);
HVL_KERNELS("LocalRank", .HostMemory("local_rank"), LocalRankKernel);
HVL_KERNELS("LocalSize", .HostMemory("local_size"), LocalSizeKernel);
HVL_KERNELS("Size", .HostMemory("size"), SizeKernel);
HVL_KERNELS("ProcessSetIncluded", .HostMemory("included"), IncludedKernel);

}  // namespace horovodlike_tensorflow

// Called by native.py.

extern "C" __attribute__((visibility("default"))) void horovodlike_tensorflow_enter(int32_t rank, int32_t local_rank,
                                                                                    int32_t local_size) {
  horovodlike_tensorflow::Job::current().enter({rank, local_rank, local_size});
  horovodlike_tensorflow::marked_steps.count.store(0);
}

// Returns the number of steps that graphs have marked since init(); sets *duration to the nanoseconds from the first to
// the last one.
extern "C" __attribute__((visibility("default"))) int64_t horovodlike_tensorflow_steps(int64_t* duration) {
  const horovodlike_tensorflow::Steps& steps = horovodlike_tensorflow::marked_steps;
  const int64_t count = steps.count.load();
  *duration = count > 1 ? std::max<int64_t>(0, steps.last.load() - steps.first.load()) : 0;
  return count;
}

extern "C" __attribute__((visibility("default"))) void horovodlike_tensorflow_set_membership(int32_t process_set,
                                                                                             int32_t size,
                                                                                             int32_t place) {
  horovodlike_tensorflow::Job::current().set_membership(process_set, {size, place});
}
