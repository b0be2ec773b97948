#include "base/hmac.h"

#include <cstring>

namespace hvl {

Hmac::Hmac(const void* key, size_t num_bytes) {
  std::array<uint8_t, Sha256::kBlockBytes> inner{};
  if (num_bytes > inner.size()) {
    Sha256 hash;
    hash.add(key, num_bytes);
    const Sha256::Digest digest = hash.digest();
    std::memcpy(inner.data(), digest.data(), digest.size());
  } else if (num_bytes > 0) {
    std::memcpy(inner.data(), key, num_bytes);
  }
  auto outer = inner;
  for (uint8_t& byte : inner) byte ^= 0x36;
  for (uint8_t& byte : outer) byte ^= 0x5c;
  inner_start_.add(inner.data(), inner.size());
  outer_start_.add(outer.data(), outer.size());
  inner_ = inner_start_;
}

Sha256::Digest Hmac::digest() {
  const Sha256::Digest inner = inner_.digest();
  inner_ = inner_start_;
  Sha256 outer = outer_start_;
  outer.add(inner.data(), inner.size());
  return outer.digest();
}

bool equal_in_constant_time(const void* a, const void* b, size_t num_bytes) {
  const auto* left = static_cast<const volatile uint8_t*>(a);
  const auto* right = static_cast<const volatile uint8_t*>(b);
  uint8_t difference = 0;
  for (size_t i = 0; i < num_bytes; ++i) difference |= left[i] ^ right[i];
  return difference == 0;
}

}  // namespace hvl
