// Runs a fuzz target without libFuzzer: mutates valid inputs. Usage: fuzz_... [seconds] [seed]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fuzz_seeds.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes);

namespace {

using Random = std::mt19937_64;

size_t below(size_t limit, Random* random) { return (*random)() % limit; }

void overwrite(std::string* input, Random* random) {
  static const uint64_t kValues[] = {0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fffffff, 0xffffffff, INT64_MAX, UINT64_MAX};
  const uint64_t value = kValues[below(sizeof kValues / sizeof kValues[0], random)];
  const size_t width = std::min<size_t>(size_t{1} << below(4, random), input->size());
  std::memcpy(&(*input)[below(input->size() - width + 1, random)], &value, width);
}

void mutate(const std::vector<std::string>& seeds, std::string* input, Random* random) {
  const std::string& other = seeds[below(seeds.size(), random)];
  const size_t at = below(input->size() + 1, random);
  switch (below(7, random)) {
    case 0:
      if (at < input->size()) (*input)[at] ^= static_cast<char>(1 << below(8, random));
      break;
    case 1:
      if (at < input->size()) (*input)[at] = static_cast<char>((*random)());
      break;
    case 2:
      if (!input->empty()) overwrite(input, random);
      break;
    case 3: input->resize(at); break;
    case 4: input->insert(at, 1 + below(8, random), static_cast<char>((*random)())); break;
    case 5: input->erase(at, 1 + below(8, random)); break;
    default: input->replace(at, std::string::npos, other, below(other.size() + 1, random), std::string::npos);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);  // also when an input ends the process

  const std::vector<std::string> seeds = fuzz_seeds();
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t runs = 0;
  for (; runs % 256 != 0 || std::chrono::steady_clock::now() < end; ++runs) {
    std::string input = seeds[below(seeds.size(), &random)];
    for (size_t n = 1 + below(4, &random); n > 0; --n) mutate(seeds, &input, &random);
    // Memory of the very size, so that a sanitizer sees every read past the end.
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[input.size()]);
    std::copy(input.begin(), input.end(), exact.get());
    LLVMFuzzerTestOneInput(exact.get(), input.size());
  }
  std::printf("%llu runs\n", static_cast<unsigned long long>(runs));
  return 0;
}
