// The state of a process of this host, from /proc.
#pragma once

#include <fstream>
#include <iterator>
#include <string>

namespace hvl {

// The state of a process as ps shows it; '?' if it cannot be read.
inline char state_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const size_t end_of_name = text.rfind(')');  // the name may contain any character
  return end_of_name != std::string::npos && end_of_name + 2 < text.size() ? text[end_of_name + 2] : '?';
}

// True if a signal or a debugger has stopped the process.
inline bool is_stopped(int pid) {
  const char state = state_of(pid);
  return state == 'T' || state == 't';
}

}  // namespace hvl
