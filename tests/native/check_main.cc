// Runs the tests that are linked with it: all, or those of the file, such as `hosts_test`, that the argument names, or
// those with names that contain it.
#include <cstdio>
#include <cstring>
#include <string>

#include "check.h"

namespace {

// The name of its file, without folders and extension.
std::string stem_of(const check::Test& test) {
  const char* slash = std::strrchr(test.file, '/');
  const std::string name = slash == nullptr ? test.file : slash + 1;
  return name.substr(0, name.find('.'));
}

bool run_one(const check::Test& test) {
  const int before = check::num_failures;
  try {
    test.run();
  } catch (const check::RequirementFailed&) {  // already reported
  } catch (const std::exception& error) {
    check::report(false, test.name, 0, error.what());
  }
  const bool passed = check::num_failures == before;
  std::printf("%s %s\n", passed ? "ok  " : "FAIL", test.name);
  std::fflush(stdout);
  return passed;
}

}  // namespace

int main(int argc, char** argv) {
  int run = 0;
  int failed = 0;
  for (const check::Test& test : check::tests()) {
    if (argc > 1 && stem_of(test) != argv[1] && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++run;
    failed += run_one(test) ? 0 : 1;
  }
  std::printf("%d of %d tests passed\n", run - failed, run);
  return failed == 0 && run > 0 ? 0 : 1;
}
