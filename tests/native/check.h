// A small test framework; check_main.cc has the main() of its programs.
//
//   TEST(name) { CHECK(condition); CHECK_EQ(a, b); CHECK_HAS(text, part); REQUIRE(condition); }
//
// A failed CHECK is reported and the test goes on (any thread may check); a failed REQUIRE also ends the test (the
// test's own thread only).
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
  const char* file;
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline std::atomic<int> num_failures{0};

struct Registration {
  Registration(const char* file, const char* name, void (*run)()) { tests().push_back({file, name, run}); }
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

inline bool report_has(const std::string& text, const std::string& part, const char* file, int line, const char* what) {
  const bool has = text.find(part) != std::string::npos;
  return has ? true : report(false, file, line, what + (": \"" + part) + "\" is not in \"" + text + "\"");
}

// How many times a part is in a text.
inline size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace check

// Files of a folder are compiled as one, and some of them have tests of the same name: hence the number.
#define TEST(name) CHECK_TEST_NUMBER(name, __COUNTER__)
#define CHECK_TEST_NUMBER(name, number) CHECK_TEST_FUNCTION(name, number)
#define CHECK_TEST_FUNCTION(name, number)                                                                   \
  static void test_##number##_##name();                                                                     \
  static const check::Registration registration_##number##_##name(__FILE__, #name, test_##number##_##name); \
  static void test_##number##_##name()

#define CHECK(condition) check::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_HAS(text, part) check::report_has((text), (part), __FILE__, __LINE__, #text " has " #part)
#define REQUIRE(condition)                                   \
  do {                                                       \
    if (!CHECK(condition)) throw check::RequirementFailed(); \
  } while (false)
