// Prints the HMAC-SHA256 of random messages under random keys, for test_native.py to compare with Python's. One line
// each: key, message, MAC, in hexadecimal digits. Usage: print_macs [seed]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "base/hmac.h"

namespace {

std::string random_bytes(size_t count, std::mt19937_64* random) {
  std::string bytes;
  while (bytes.size() < count) bytes += static_cast<char>((*random)());
  return bytes;
}

void print_hex(const void* bytes, size_t count, char end) {
  for (size_t i = 0; i < count; ++i) std::printf("%02x", static_cast<const unsigned char*>(bytes)[i]);
  std::putchar(end);
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  for (size_t length = 0; length < 400; ++length) {
    const std::string key = random_bytes(random() % 150, &random);
    const std::string message = random_bytes(length, &random);
    hvl::Hmac mac(key.data(), key.size());
    const size_t cut = random() % (length + 1);
    mac.add(message.data(), cut);
    mac.add(message.data() + cut, length - cut);
    print_hex(key.data(), key.size(), ' ');
    print_hex(message.data(), message.size(), ' ');
    const hvl::Sha256::Digest digest = mac.digest();
    print_hex(digest.data(), digest.size(), '\n');
  }
  return 0;
}
