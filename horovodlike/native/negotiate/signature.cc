#include "negotiate/signature.h"

#include <utility>

namespace hvl {
namespace {

// NaN equals itself here: a rank that repeats a NaN factor must not look like one that changed it.
bool same_factor(double a, double b) { return a == b || (a != a && b != b); }

}  // namespace

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && op == other.op && device == other.device && root == other.root &&
         process_set == other.process_set && same_factor(prescale, other.prescale) &&
         same_factor(postscale, other.postscale) && name == other.name && tensors == other.tensors &&
         arguments == other.arguments;
}

std::vector<int64_t> take_varying(Signature* signature) {
  std::vector<int64_t> varying;
  if (!allocates(signature->kind)) return varying;
  for (TensorSignature& tensor : signature->tensors) {
    varying.push_back(tensor.shape.empty() ? 0 : std::exchange(tensor.shape[0], 0));
  }
  varying.insert(varying.end(), signature->arguments.begin(), signature->arguments.end());
  signature->arguments.clear();
  return varying;
}

void put_varying(const int64_t* varying, size_t count, Signature* signature) {
  if (!allocates(signature->kind)) return;
  const size_t num_tensors = signature->tensors.size();
  for (size_t t = 0; t < num_tensors; ++t) {
    Shape& shape = signature->tensors[t].shape;
    if (!shape.empty()) shape[0] = varying[t];
  }
  signature->arguments.assign(varying + num_tensors, varying + count);
}

MemoryFormat Signature::memory_format(size_t tensor) const {
  return arguments.empty() ? HVL_ROW_MAJOR : static_cast<MemoryFormat>(arguments[tensor]);
}

int64_t Signature::num_bytes() const {
  int64_t total = 0;
  for (const TensorSignature& tensor : tensors) total += tensor.num_bytes();
  return total;
}

}  // namespace hvl
