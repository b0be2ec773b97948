// Fuzzes the reader of frames: no stream may make it read past the end, allocate much, or return a frame that the
// holder of the key has not sealed at this position of the stream. The first byte of an input is the size of the pieces
// in which the rest arrives; 0: as a whole.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fuzz_seeds.h"
#include "transport/tcp/seal.h"

namespace {

constexpr hvl::ChannelKey kKey = {7};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::string stream_of(int num_frames, size_t num_bytes, bool with_end) {
  hvl::Sealer sealer(kKey);
  hvl::ByteQueue stream;
  for (int i = 0; i < num_frames; ++i) sealer.seal(std::string(num_bytes * static_cast<size_t>(i), 'x'), &stream);
  if (with_end) sealer.seal_end(&stream);
  return std::string(stream.data(), stream.size());
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (bool with_end : {false, true}) {
    for (int num_frames : {0, 1, 2, 5}) {
      for (size_t num_bytes : {0, 1, 3, 40}) seeds.push_back('\7' + stream_of(num_frames, num_bytes, with_end));
    }
  }
  for (std::string seed : std::vector<std::string>(seeds)) {
    seed[0] = 0;
    seeds.push_back(seed + seed.substr(1));  // a replay of everything
    seeds.push_back(seed);
  }
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  if (num_bytes == 0) return 0;
  const size_t piece = bytes[0] == 0 ? num_bytes : bytes[0];
  const std::string stream(bytes + 1, bytes + num_bytes);
  hvl::Opener opener(kKey, "rank 1");
  hvl::Sealer sealer(kKey);
  hvl::ByteQueue again;  // what was handed out, sealed once more
  bool accepted = true;
  for (size_t fed = 0; accepted && fed < stream.size(); fed += piece) {
    const std::string part = stream.substr(fed, piece);
    accepted = opener.feed(part.data(), part.size()).ok();
    std::string payload;
    while (opener.receive(&payload)) {
      if (!accepted) fail("a frame after an error");
      sealer.seal(payload, &again);
    }
  }
  if (opener.is_at_end()) sealer.seal_end(&again);
  const std::string genuine(again.data(), again.size());
  if (stream.compare(0, genuine.size(), genuine) != 0) fail("a frame that nobody has sealed");
  if (opener.close().ok() && !(accepted && genuine == stream)) fail("a stream that is not whole has ended well");
  return 0;
}
