// The seeds of a fuzz target, for fuzz_main.cc.
#pragma once

#include <string>
#include <vector>

// Valid inputs of the target that is linked with it.
std::vector<std::string> fuzz_seeds();
