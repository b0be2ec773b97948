// A small test framework. Include it in exactly one file of a test executable: it defines main().
//
//   TEST(name) { CHECK(condition); CHECK_EQ(a, b); REQUIRE(condition); }
//
// A failed CHECK is reported and the test goes on (any thread may check); a failed REQUIRE also ends the test (the
// test's own thread only). Run with an argument, only the tests whose name contains it are run.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

// Whether some of many cases are enough: if the environment says so, and under sanitizers, which are slow, and look at
// other things than at values.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline const bool is_brief = true;
#else
inline const bool is_brief = std::getenv("CHECK_BRIEFLY") != nullptr;
#endif

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> num_failures{0};

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

struct RequirementFailed {};

template <typename T, typename = void>
struct IsPrintable : std::false_type {};
template <typename T>
struct IsPrintable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>>
    : std::true_type {};

template <typename T>
std::string text_of(const T& value) {
  std::ostringstream out;
  if constexpr (IsPrintable<T>::value) {
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << "(no text)";
  }
  return out.str();
}

inline bool report(bool passed, const char* file, int line, const std::string& what) {
  if (!passed) {
    ++num_failures;
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  }
  return passed;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-compare"  // CHECK_EQ(list.size(), 3) is fine
template <typename A, typename B>
bool report_equal(const A& a, const B& b, const char* file, int line, const char* what) {
  const bool equal = a == b;
  return equal ? true : report(false, file, line, what + (": " + text_of(a)) + " != " + text_of(b));
}
#pragma GCC diagnostic pop

inline bool run_one(const Test& test) {
  const int before = num_failures;
  try {
    test.run();
  } catch (const RequirementFailed&) {  // already reported
  } catch (const std::exception& error) {
    report(false, test.name, 0, error.what());
  }
  const bool passed = num_failures == before;
  std::printf("%s %s\n", passed ? "ok  " : "FAIL", test.name);
  std::fflush(stdout);
  return passed;
}

}  // namespace check

#define TEST(name)                                                          \
  static void test_##name();                                                \
  static const check::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define REQUIRE(condition)                                   \
  do {                                                       \
    if (!CHECK(condition)) throw check::RequirementFailed(); \
  } while (false)

int main(int argc, char** argv) {
  int run = 0;
  int failed = 0;
  for (const check::Test& test : check::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++run;
    failed += check::run_one(test) ? 0 : 1;
  }
  std::printf("%d of %d tests passed\n", run - failed, run);
  return failed == 0 && run > 0 ? 0 : 1;
}
