// Memory that something outside of this library may still write to.
#pragma once

#include <mutex>
#include <vector>

namespace hvl {

// Keeps it as long as the process lives. Any thread.
inline void leak(void* memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<void*>;  // outlives all that runs at exit
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(memory);
}

}  // namespace hvl
