#include "nccl/nccl_communicator.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/minifloat.h"

namespace hvl {

namespace {

constexpr size_t kMostFactors = 256;  // whose operations are kept

// A factor as NCCL reads it: a number of the tensor's dtype.
union Scalar {
  uint16_t half;
  float single;
  double real;
};

Scalar scalar_of(NcclDataType dtype, double factor) {
  Scalar scalar{};
  switch (dtype) {
    case kNcclFloat16: scalar.half = narrow<Float16>(factor).bits; break;
    case kNcclBfloat16: scalar.half = narrow<Bfloat16>(factor).bits; break;
    case kNcclFloat32: scalar.single = static_cast<float>(factor); break;
    default: scalar.real = factor;
  }
  return scalar;
}

std::pair<NcclDataType, uint64_t> key_of(const NcclReduction& plan) {
  uint64_t bits = 0;
  memcpy(&bits, &plan.factor, sizeof bits);
  return {plan.dtype, bits};
}

bool has_begun(NcclResult result) { return result == kNcclSuccess || result == kNcclInProgress; }

}  // namespace

Status NcclCommunicator::failed(const char* what, NcclResult result) const {
  return Status(HVL_RESOURCES, std::string(what) + ": " + nccl_.describe(result, comm_));
}

Status NcclCommunicator::start(const NcclUniqueId& id, int size, int place) {
  NcclConfig config;
  const NcclResult result = nccl_.ncclCommInitRankConfig(&comm_, size, id, place, &config);
  return has_begun(result) ? Status() : failed("NCCL cannot make a communicator", result);
}

Status NcclCommunicator::poll(bool* done) {
  NcclResult state = kNcclSuccess;
  const NcclResult result = nccl_.ncclCommGetAsyncError(comm_, &state);
  if (result != kNcclSuccess) return failed("NCCL does not say how it gets on", result);
  *done = state == kNcclSuccess;
  return has_begun(state) ? Status() : failed("a collective of NCCL has failed", state);
}

Status NcclCommunicator::launch(const std::vector<NcclReduction>& reductions, const std::function<void()>& calls) {
  first_error_ = kNcclSuccess;
  if (scaled_.size() > kMostFactors) destroy_ops();
  for (const NcclReduction& reduction : reductions) make_op(reduction);
  note(nccl_.ncclGroupStart());
  calls();
  note(nccl_.ncclGroupEnd());
  return first_error_ == kNcclSuccess ? Status() : failed("NCCL has refused a collective", first_error_);
}

void NcclCommunicator::note(NcclResult result) {
  if (first_error_ == kNcclSuccess && !has_begun(result)) first_error_ = result;
}

void NcclCommunicator::abort() {
  if (comm_ != nullptr) nccl_.ncclCommAbort(comm_);
  comm_ = nullptr;
}

Status NcclCommunicator::finish(bool* done) {
  *done = false;
  if (!is_finalizing_) {
    destroy_ops();
    is_finalizing_ = true;
    const NcclResult result = nccl_.ncclCommFinalize(comm_);
    return has_begun(result) ? Status() : failed("NCCL cannot finalize a communicator", result);
  }
  const Status status = poll(done);
  if (!status.ok() || !*done) return status;
  nccl_.ncclCommDestroy(comm_);
  comm_ = nullptr;
  return status;
}

void NcclCommunicator::make_op(const NcclReduction& plan) {
  if (plan.factor == 1.0 || scaled_.count(key_of(plan)) != 0) return;
  Scalar scalar = scalar_of(plan.dtype, plan.factor);
  NcclRedOp made = kNcclSum;
  const NcclResult result = nccl_.ncclRedOpCreatePreMulSum(&made, &scalar, plan.dtype, kNcclScalarHostImmediate, comm_);
  note(result);
  if (result == kNcclSuccess) scaled_[key_of(plan)] = made;
}

void NcclCommunicator::destroy_ops() {
  for (const auto& scaled : scaled_) note(nccl_.ncclRedOpDestroy(scaled.second, comm_));
  scaled_.clear();
}

// If the operation could not be made, the launch has failed, and the returned one does not matter.
NcclRedOp NcclCommunicator::op_of(const NcclReduction& plan) const {
  const auto scaled = scaled_.find(key_of(plan));
  return plan.factor == 1.0 || scaled == scaled_.end() ? plan.op : scaled->second;
}

void NcclCommunicator::all_reduce(const void* from, void* to, uint64_t count, const NcclReduction& reduction) {
  note(nccl_.ncclAllReduce(from, to, count, reduction.dtype, op_of(reduction), comm_, stream_));
}

void NcclCommunicator::reduce(const void* from, void* to, uint64_t count, const NcclReduction& reduction, int root) {
  note(nccl_.ncclReduce(from, to, count, reduction.dtype, op_of(reduction), root, comm_, stream_));
}

void NcclCommunicator::reduce_scatter(const void* from, void* to, uint64_t count_received,
                                      const NcclReduction& reduction) {
  note(nccl_.ncclReduceScatter(from, to, count_received, reduction.dtype, op_of(reduction), comm_, stream_));
}

void NcclCommunicator::broadcast(const void* from, void* to, uint64_t num_bytes, int root) {
  note(nccl_.ncclBroadcast(from, to, num_bytes, kNcclUint8, root, comm_, stream_));
}

void NcclCommunicator::all_gather(const void* from, void* to, uint64_t bytes_sent) {
  note(nccl_.ncclAllGather(from, to, bytes_sent, kNcclUint8, comm_, stream_));
}

void NcclCommunicator::send(const void* from, uint64_t num_bytes, int peer) {
  note(nccl_.ncclSend(from, num_bytes, kNcclUint8, peer, comm_, stream_));
}

void NcclCommunicator::receive(void* to, uint64_t num_bytes, int peer) {
  note(nccl_.ncclRecv(to, num_bytes, kNcclUint8, peer, comm_, stream_));
}

bool abort_all(const std::shared_ptr<Gpu>& gpu, std::vector<std::unique_ptr<NcclCommunicator>> communicators,
               uint64_t timeout) {
  struct Aborts {
    std::mutex mutex;
    std::condition_variable ended;
    size_t num_left = 0;
  };
  const auto aborts = std::make_shared<Aborts>();
  aborts->num_left = communicators.size();
  for (std::unique_ptr<NcclCommunicator>& communicator : communicators) {
    const std::shared_ptr<NcclCommunicator> taken = std::move(communicator);
    auto abort = [gpu = gpu, taken, aborts]() mutable {
      {
        const Gpu::Current current(*gpu);
        taken->abort();
      }
      gpu = nullptr;  // released before the end is reported
      const std::lock_guard<std::mutex> lock(aborts->mutex);
      --aborts->num_left;
      aborts->ended.notify_all();
    };
    try {
      std::thread(abort).detach();
    } catch (const std::system_error&) {  // no thread could be started
      abort();
    }
  }
  std::unique_lock<std::mutex> lock(aborts->mutex);
  return aborts->ended.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return aborts->num_left == 0; });
}

}  // namespace hvl
