// What a fuzz target gives fuzz_main.cc to start from.
#pragma once

#include <string>
#include <vector>

// Valid inputs of the target that is linked with it.
std::vector<std::string> fuzz_seeds();
