// The stream of frames without a socket.
#include "transport/tcp/seal.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "check.h"

namespace {
std::atomic<size_t> largest_allocation{0};
}

void* operator new(size_t num_bytes) {
  if (num_bytes > largest_allocation) largest_allocation = num_bytes;
  void* memory = std::malloc(num_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace hvl {
namespace {

constexpr ChannelKey kKey = {1, 2, 3};
constexpr ChannelKey kOtherKey = {1, 2, 4};
const char* const kFrom = "rank 2 (host b, 10.0.0.3)";
const std::vector<std::string> kPayloads = {"first", "", "the third is longer", std::string(100, 'x')};

std::string sealed(const std::vector<std::string>& payloads, bool with_end, const ChannelKey& key = kKey) {
  Sealer sealer(key);
  ByteQueue stream;
  for (const std::string& payload : payloads) sealer.seal(payload, &stream);
  if (with_end) sealer.seal_end(&stream);
  return std::string(stream.data(), stream.size());
}

// The frames of the stream, each as it is on the wire.
std::vector<std::string> frames_of(const std::vector<std::string>& payloads) {
  std::vector<std::string> frames;
  Sealer sealer(kKey);
  for (const std::string& payload : payloads) {
    ByteQueue stream;
    sealer.seal(payload, &stream);
    frames.emplace_back(stream.data(), stream.size());
  }
  return frames;
}

std::vector<std::string> received(Opener* opener) {
  std::vector<std::string> payloads;
  while (opener->has_frame()) {
    payloads.emplace_back();
    CHECK(opener->receive(&payloads.back()));
  }
  std::string none;
  CHECK(!opener->receive(&none));
  return payloads;
}

// The error of the stream.
std::string flaw_of(const std::string& stream, const ChannelKey& key = kKey) {
  Opener opener(key, kFrom);
  const Status fed = opener.feed(stream.data(), stream.size());
  if (!fed.ok()) CHECK(!opener.has_frame());
  const Status status = fed.ok() ? opener.close() : fed;
  CHECK(status.ok() || status.code() == HVL_JOB_BROKEN);
  return status.message();
}

// The same computed in Python: struct.pack("<I", 3) + b"abc", and the first 16 bytes of hmac.digest(bytes([1, 2, 3] +
// [0] * 29), struct.pack("<QI", number, 3) + b"abc", "sha256"), for numbers 0 and 1; the end as number 2 with
// 0xffffffff.
TEST(the_wire_is_what_it_always_was) {
  std::string hex;
  for (unsigned char byte : sealed({"abc", "abc"}, true)) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  CHECK_EQ(hex,
           "030000006162630d798a4860ded9d18207264bc83b6032"
           "03000000616263f129d0e529cfb6e36d7e315dc6538299"
           "ffffffff7f2078347c4ac33227930c8f6fe8fc19");
}

TEST(any_cut_of_the_stream_gives_the_same_frames) {
  const std::string stream = sealed(kPayloads, true);
  for (size_t cut = 0; cut <= stream.size(); ++cut) {
    Opener opener(kKey, kFrom);
    CHECK(opener.feed(stream.data(), cut).ok());
    std::vector<std::string> payloads = received(&opener);
    CHECK_EQ(opener.is_at_end(), cut == stream.size());
    CHECK(opener.feed(stream.data() + cut, stream.size() - cut).ok());
    for (const std::string& payload : received(&opener)) payloads.push_back(payload);
    CHECK(payloads == kPayloads);
    CHECK(opener.is_at_end());
    CHECK(opener.close().ok());
  }
}

TEST(byte_by_byte) {
  Opener opener(kKey, kFrom);
  std::vector<std::string> payloads;
  for (char byte : sealed(kPayloads, true)) {
    CHECK(opener.feed(&byte, 1).ok());
    for (const std::string& payload : received(&opener)) payloads.push_back(payload);
  }
  CHECK(payloads == kPayloads);
  CHECK(opener.close().ok());
}

TEST(a_frame_is_handed_out_while_others_wait) {
  const std::string stream = sealed(std::vector<std::string>(2000, "some payload"), false);
  Opener opener(kKey, kFrom);
  std::string payload;
  size_t fed = 0;
  for (int count = 0; count < 2000; ++count) {
    const size_t more = std::min<size_t>(stream.size() - fed, 50);  // more than a frame
    CHECK(opener.feed(stream.data() + fed, more).ok());
    fed += more;
    REQUIRE(opener.receive(&payload));
    REQUIRE(payload == "some payload");
  }
  CHECK(!opener.has_frame());
}

TEST(every_bit_counts) {
  const std::string stream = sealed(kPayloads, true);
  for (size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    std::string changed = stream;
    changed[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    Opener opener(kKey, kFrom);
    const Status fed = opener.feed(changed.data(), changed.size());
    // A length that has grown waits for bytes that do not come.
    CHECK(!fed.ok() || !opener.close().ok());
    CHECK(!opener.is_at_end());
    const std::vector<std::string> payloads = received(&opener);
    REQUIRE(payloads.size() < kPayloads.size() + (fed.ok() ? 1 : 0));
    for (size_t i = 0; i < payloads.size(); ++i) CHECK(payloads[i] == kPayloads[i]);
  }
}

TEST(errors_say_what_has_happened) {
  const std::vector<std::string> frames = frames_of({"a", "b", "c", "d"});
  const std::string from = std::string(" from ") + kFrom;
  CHECK_EQ(flaw_of(frames[0] + frames[1] + frames[0]),
           "frame 1" + from + " came in place of frame 3: it was replayed on the way");
  CHECK_EQ(flaw_of(frames[0] + frames[2] + frames[1]),
           "frame 3" + from + " came in place of frame 2: it was reordered, or others were dropped, on the way");
  const std::string wrong =
      "the MAC of frame 2" + from + " is wrong: it was changed on the way, or the other side has another key";
  std::string changed = frames[0] + frames[1];
  changed[frames[0].size() + 4] ^= 1;
  CHECK_EQ(flaw_of(changed), wrong);
  CHECK(flaw_of(sealed({"a"}, false), kOtherKey).find("the MAC of frame 1") == 0);
  CHECK_EQ(flaw_of(frames[0] + frames[1].substr(0, 3)),
           std::string(kFrom) + " has closed its connection in the middle of frame 2");
  CHECK_EQ(flaw_of(frames[0] + frames[1]),
           std::string(kFrom) + " has closed its connection without a word: its process has ended or was killed");
  CHECK_EQ(flaw_of(sealed({"a"}, true) + "x"), std::string(kFrom) + " has sent something after the end of its frames");
}

TEST(a_frame_far_away_is_wrong_all_the_same) {
  const std::vector<std::string> frames = frames_of(std::vector<std::string>(100, "x"));
  std::string stream;
  for (size_t i = 0; i < 50; ++i) stream += frames[i];
  CHECK(flaw_of(stream + frames[0]).find("the MAC of frame 51 from") == 0);
  CHECK(flaw_of(stream + frames[99]).find("the MAC of frame 51 from") == 0);
  CHECK(flaw_of(stream + frames[49]).find("frame 50 from") == 0);
}

TEST(every_truncation_is_noticed) {
  const std::string stream = sealed(kPayloads, true);
  for (size_t length = 0; length < stream.size(); ++length) {
    CHECK_HAS(flaw_of(stream.substr(0, length)), "has closed its connection");
  }
  CHECK_EQ(flaw_of(stream), "");
}

TEST(no_frames_after_an_error) {
  const std::vector<std::string> frames = frames_of({"a", "b", "c"});
  Opener opener(kKey, kFrom);
  CHECK(opener.feed(frames[0].data(), frames[0].size()).ok());
  const Status first = opener.feed(frames[0].data(), frames[0].size());
  CHECK(!first.ok());
  CHECK(!opener.has_frame());  // not even what was good
  const Status second = opener.feed(frames[1].data(), frames[1].size());
  CHECK_EQ(second.message(), first.message());
  CHECK(!opener.has_frame());
  CHECK_EQ(opener.close().message(), first.message());
}

TEST(a_length_alone_takes_no_memory) {
  for (uint32_t length : {uint32_t{kFrameLimit} + 1, 0x7fffffffu, 0xfffffffeu}) {
    largest_allocation = 0;
    const std::string flaw = flaw_of(std::string(reinterpret_cast<const char*>(&length), sizeof length));
    CHECK_EQ(flaw,
             "a frame of " + std::to_string(length) + " bytes from " + kFrom + " is over the limit of 16777216 bytes");
    CHECK(largest_allocation < 1000);
  }
  largest_allocation = 0;
  const uint32_t length = kFrameLimit;
  const std::string promise = std::string(reinterpret_cast<const char*>(&length), sizeof length) + "the rest is late";
  CHECK_HAS(flaw_of(promise), "in the middle of frame 1");
  CHECK(largest_allocation < 1000);
}

TEST(memory_grows_with_what_arrives) {
  const std::string stream = sealed({std::string(kFrameLimit, 'x'), "next"}, true);
  largest_allocation = 0;
  Opener opener(kKey, kFrom);
  const size_t piece = 10000;
  for (size_t fed = 0; fed < stream.size(); fed += piece) {
    REQUIRE(opener.feed(stream.data() + fed, std::min(piece, stream.size() - fed)).ok());
    REQUIRE(largest_allocation <= 2 * (fed + piece) + 1000);
  }
  CHECK(received(&opener) == (std::vector<std::string>{std::string(kFrameLimit, 'x'), "next"}));
  CHECK(opener.close().ok());
}

TEST(a_stream_does_not_grow_because_it_is_never_empty) {
  Opener opener(kKey, kFrom);
  const std::string payload(1000, 'x');
  Sealer sealer(kKey);
  ByteQueue wire;
  sealer.seal(payload, &wire);
  largest_allocation = 0;
  for (int count = 0; count < 2000; ++count) {
    sealer.seal(payload, &wire);
    const size_t num_bytes = payload.size() + 20;
    REQUIRE(opener.feed(wire.data(), num_bytes).ok());
    wire.drop(num_bytes);
    std::string out;
    REQUIRE(count == 0 || opener.receive(&out));
  }
  CHECK(largest_allocation < 20000);
}

}  // namespace
}  // namespace hvl
