// SHA-256 (FIPS 180-4), HMAC-SHA256 (RFC 2104), and a comparison of secrets in constant time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hvl {

// The hash of all bytes that were added so far. A copy continues from the state of the original.
class Sha256 {
 public:
  static constexpr size_t kBlockBytes = 64;
  using Digest = std::array<uint8_t, 32>;

  void add(const void* bytes, size_t num_bytes);
  Digest digest() const;

  using State = std::array<uint32_t, 8>;

 private:
  State state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlockBytes> rest_{};  // the bytes that do not fill a block yet
  uint64_t num_bytes_ = 0;
};

// The compression function for `count` whole blocks: in portable code, and with x86 SHA instructions. The second
// function may run only if has_sha_instructions() is true.
void sha256_blocks_portable(Sha256::State* state, const uint8_t* blocks, size_t count);
void sha256_blocks_x86(Sha256::State* state, const uint8_t* blocks, size_t count);

// Computes the MACs of any number of messages, one after the other, with one key.
class Hmac {
 public:
  Hmac(const void* key, size_t num_bytes);

  // Adds to the message.
  void add(const void* bytes, size_t num_bytes) { inner_.add(bytes, num_bytes); }
  // Returns the MAC of the message and begins the next message.
  Sha256::Digest digest();

 private:
  // The hash states after the key: they are the same for all messages.
  Sha256 inner_start_;
  Sha256 outer_start_;
  Sha256 inner_;
};

// True if the bytes are equal. The duration depends on the number of bytes only.
bool equal_in_constant_time(const void* a, const void* b, size_t num_bytes);

}  // namespace hvl
