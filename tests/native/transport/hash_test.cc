// SHA-256 and HMAC-SHA256: the published vectors, and both implementations of the compression function.
#include <cstdint>
#include <string>
#include <vector>

#include "base/hmac.h"
#include "base/target.h"
#include "check.h"

namespace hvl {
namespace {

std::string hex(const Sha256::Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string sha256_of(const std::string& message) {
  Sha256 hash;
  hash.add(message.data(), message.size());
  return hex(hash.digest());
}

std::string hmac_of(const std::string& key, const std::string& message) {
  Hmac mac(key.data(), key.size());
  mac.add(message.data(), message.size());
  return hex(mac.digest());
}

std::string bytes_from(int first, size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += static_cast<char>(first + static_cast<int>(i));
  return bytes;
}

// FIPS 180-4's examples, as NIST publishes them (CAVP and "SHA-256 examples").
TEST(sha256_published_vectors) {
  CHECK_EQ(sha256_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(
      sha256_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmn"
                "opqrstnopqrstu"),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK_EQ(sha256_of(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, test cases 1 to 4, 6 and 7; case 5 is about a truncated MAC.
TEST(hmac_published_vectors) {
  CHECK_EQ(hmac_of(std::string(20, '\x0b'), "Hi There"),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hmac_of("Jefe", "what do ya want for nothing?"),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hmac_of(std::string(20, '\xaa'), std::string(50, '\xdd')),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(hmac_of(bytes_from(1, 25), std::string(50, '\xcd')),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(hmac_of(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hmac_of(std::string(131, '\xaa'),
                   "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
                   "to be hashed before being used by the HMAC algorithm."),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(one_key_for_many_messages) {
  Hmac mac("Jefe", 4);
  const Sha256::Digest empty = mac.digest();
  for (int again = 0; again < 2; ++again) {
    mac.add("what do ya want ", 16);
    mac.add("for nothing?", 12);
    CHECK_EQ(hex(mac.digest()), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  }
  CHECK(mac.digest() == empty);
}

TEST(any_cut_of_a_message_has_its_hash) {
  const std::string message = bytes_from(0, 200);
  for (size_t length = 0; length <= message.size(); ++length) {
    const std::string whole = sha256_of(message.substr(0, length));
    for (size_t cut = 0; cut <= length; ++cut) {
      Sha256 hash;
      hash.add(message.data(), cut);
      hash.add(message.data() + cut, length - cut);
      REQUIRE(hex(hash.digest()) == whole);
    }
  }
}

TEST(both_compression_functions_agree) {
  if (!has_sha_instructions()) std::printf("     this processor or build has one of them only\n");
  const std::string blocks = bytes_from(7, 5 * Sha256::kBlockBytes);
  const auto* bytes = reinterpret_cast<const uint8_t*>(blocks.data());
  for (size_t count = 0; count <= 5; ++count) {
    Sha256::State portable{1, 2, 3, 0xffffffff, 5, 6, 7, 8};
    Sha256::State special = portable;
    sha256_blocks_portable(&portable, bytes, count);
    if (has_sha_instructions()) {
      sha256_blocks_x86(&special, bytes, count);
      CHECK(portable == special);
    }
  }
}

TEST(comparison_sees_every_bit) {
  const std::string right = bytes_from(100, 32);
  CHECK(equal_in_constant_time(right.data(), right.data(), 32));
  CHECK(equal_in_constant_time("a", "b", 0));
  for (size_t bit = 0; bit < 8 * right.size(); ++bit) {
    std::string wrong = right;
    wrong[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    CHECK(!equal_in_constant_time(right.data(), wrong.data(), 32));
  }
}

}  // namespace
}  // namespace hvl
