// HMAC-SHA256 (RFC 2104), and how to compare what must not be found out by the time that it takes.
#pragma once

#include <cstddef>

#include "base/sha256.h"

namespace hvl {

// The MACs of any number of messages, one after the other, under one key.
class Hmac {
 public:
  Hmac(const void* key, size_t num_bytes);

  // Adds to the message.
  void add(const void* bytes, size_t num_bytes) { inner_.add(bytes, num_bytes); }
  // The MAC of the message; the next one begins.
  Sha256::Digest digest();

 private:
  // What follows from the key alone.
  Sha256 inner_start_;
  Sha256 outer_start_;
  Sha256 inner_;
};

// The time that it takes depends on the number of bytes only.
bool equal_in_constant_time(const void* a, const void* b, size_t num_bytes);

}  // namespace hvl
