#include "negotiate/signature.h"

namespace hvl {
namespace {

// A factor that is not a number equals itself here: a rank that repeats it must not look like one that changed it.
bool same_factor(double a, double b) { return a == b || (a != a && b != b); }

}  // namespace

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && op == other.op && device == other.device && root == other.root &&
         process_set == other.process_set && same_factor(prescale, other.prescale) &&
         same_factor(postscale, other.postscale) && name == other.name && tensors == other.tensors;
}

int64_t Signature::num_bytes() const {
  int64_t total = 0;
  for (const TensorSignature& tensor : tensors) total += tensor.num_bytes();
  return total;
}

}  // namespace hvl
