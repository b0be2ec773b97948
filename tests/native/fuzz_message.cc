// Fuzzes the decoders: no input may make them read past the end, allocate much, throw, or change its meaning when
// encoded again.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fuzz_seeds.h"
#include "message_seeds.h"

namespace {

template <typename T>
void check_input(const uint8_t* bytes, size_t num_bytes) {
  T value;
  if (!hvl::decode(bytes, num_bytes, &value).ok()) return;
  // There is one encoding of everything, so this says more than that a second decoding gives the same value.
  std::string again;
  hvl::encode(value, &again);
  if (again != std::string(reinterpret_cast<const char*>(bytes), num_bytes)) {
    std::fprintf(stderr, "the encoding of what was decoded differs from the input\n");
    std::abort();
  }
  for (const hvl::TensorSignature& tensor : value.signature.tensors) {
    if (tensor.num_bytes() < 0) std::abort();
  }
  if (value.signature.num_bytes() < 0) std::abort();
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (const hvl::Message& message : seed_messages()) seeds.push_back(encoded(message));
  for (const hvl::Record& record : seed_records()) seeds.push_back(encoded(record));
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  check_input<hvl::Message>(bytes, num_bytes);
  check_input<hvl::Record>(bytes, num_bytes);
  return 0;
}
