#include "base/hmac.h"

#include <algorithm>
#include <cstring>

#include "base/target.h"

namespace hvl {

namespace {

alignas(16) constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t rotated_right(uint32_t value, int count) { return (value >> count) | (value << (32 - count)); }

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

template <typename T>
void store_big_endian(T value, uint8_t* bytes) {
  for (size_t i = 0; i < sizeof value; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * (sizeof value - 1 - i)));
}

void compress(Sha256::State* state, const uint8_t* blocks, size_t count) {
  static const auto best = has_sha_instructions() ? sha256_blocks_x86 : sha256_blocks_portable;
  best(state, blocks, count);
}

}  // namespace

// Variables are named as in section 6.2.2 of FIPS 180-4.
void sha256_blocks_portable(Sha256::State* state, const uint8_t* blocks, size_t count) {
  for (; count > 0; --count, blocks += Sha256::kBlockBytes) {
    uint32_t w[64];
    for (size_t t = 0; t < 16; ++t) w[t] = load_big_endian(blocks + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t s0 = rotated_right(w[t - 15], 7) ^ rotated_right(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t s1 = rotated_right(w[t - 2], 17) ^ rotated_right(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    auto [a, b, c, d, e, f, g, h] = *state;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t s1 = rotated_right(e, 6) ^ rotated_right(e, 11) ^ rotated_right(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[t] + w[t];
      const uint32_t s0 = rotated_right(a, 2) ^ rotated_right(a, 13) ^ rotated_right(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const Sha256::State change{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < change.size(); ++i) (*state)[i] += change[i];
  }
}

#if HVL_X86_DISPATCH

// Two registers hold the eight words of the state: ABEF and CDGH. An instruction does two rounds: it writes the new
// ABEF over CDGH, and the old ABEF is the new CDGH.
HVL_TARGET_SHA void sha256_blocks_x86(Sha256::State* state, const uint8_t* blocks, size_t count) {
  constexpr int kReversed = 0x1b;
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* halves = reinterpret_cast<__m128i*>(state->data());
  // The names give the words of a register, the highest one first.
  const __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128(halves), kReversed);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(halves + 1), kReversed);
  __m128i abef = _mm_unpackhi_epi64(efgh, abcd);
  __m128i cdgh = _mm_unpacklo_epi64(efgh, abcd);
  for (; count > 0; --count, blocks += Sha256::kBlockBytes) {
    const __m128i old_abef = abef;
    const __m128i old_cdgh = cdgh;
    __m128i w[16];  // four words each
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i < 4) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks) + i);
        w[i] = _mm_shuffle_epi8(raw, to_big_endian);
      } else {
        const __m128i seven_back = _mm_alignr_epi8(w[i - 1], w[i - 2], 4);
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i - 4], w[i - 3]), seven_back);
        w[i] = _mm_sha256msg2_epu32(sum, w[i - 1]);
      }
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRoundConstants) + i);
      const __m128i added = _mm_add_epi32(w[i], k);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, old_abef);
    cdgh = _mm_add_epi32(cdgh, old_cdgh);
  }
  _mm_storeu_si128(halves, _mm_shuffle_epi32(_mm_unpackhi_epi64(cdgh, abef), kReversed));
  _mm_storeu_si128(halves + 1, _mm_shuffle_epi32(_mm_unpacklo_epi64(cdgh, abef), kReversed));
}

#else

void sha256_blocks_x86(Sha256::State* state, const uint8_t* blocks, size_t count) {
  sha256_blocks_portable(state, blocks, count);
}

#endif

void Sha256::add(const void* bytes, size_t num_bytes) {
  if (num_bytes == 0) return;
  const auto* next = static_cast<const uint8_t*>(bytes);
  const size_t held = num_bytes_ % kBlockBytes;
  num_bytes_ += num_bytes;
  if (held > 0) {
    const size_t taken = std::min(num_bytes, kBlockBytes - held);
    std::memcpy(&rest_[held], next, taken);
    next += taken;
    num_bytes -= taken;
    if (held + taken < kBlockBytes) return;
    compress(&state_, rest_.data(), 1);
  }
  const size_t num_blocks = num_bytes / kBlockBytes;
  compress(&state_, next, num_blocks);
  if (num_bytes % kBlockBytes > 0) std::memcpy(rest_.data(), next + num_blocks * kBlockBytes, num_bytes % kBlockBytes);
}

Sha256::Digest Sha256::digest() const {
  Sha256 padded = *this;
  // The padding fills the last block: a set bit, zeros, and the number of bits of the message.
  uint8_t padding[kBlockBytes + 8] = {0x80};
  const size_t held = num_bytes_ % kBlockBytes;
  const size_t num_zeros = (held < kBlockBytes - 8 ? kBlockBytes : 2 * kBlockBytes) - held - 8;
  store_big_endian(8 * num_bytes_, padding + num_zeros);
  padded.add(padding, num_zeros + 8);
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) store_big_endian(padded.state_[i], &digest[4 * i]);
  return digest;
}

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
