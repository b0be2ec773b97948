// The test's functions for tests in Python, which call them through ctypes.

#include <cstring>

#include "gpu_double.h"

namespace {

// As snprintf: the length of the text, of which so much is written as there is room for.
size_t put(const std::string& text, char* to, size_t room) {
  if (room > 0) {
    const size_t length = text.size() < room ? text.size() : room - 1;
    memcpy(to, text.data(), length);
    to[length] = 0;
  }
  return text.size();
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

void gpu_double_reset(int num_gpus) { gpu_double::reset(num_gpus); }
void* gpu_double_make_stream(int gpu) { return gpu_double::make_stream(gpu); }
void gpu_double_hold(void* stream) { gpu_double::hold(stream); }
void gpu_double_release(void* stream) { gpu_double::release(stream); }
void gpu_double_capture(void* stream, int captures) { gpu_double::capture(stream, captures != 0); }
void gpu_double_synchronize(void* stream) { gpu_double::synchronize(stream); }
void gpu_double_fail(int gpu, const char* function, int result) { gpu_double::fail(gpu, function, result); }

// Gives the stream a computation whose result, these bytes, is copied to memory when it is its turn.
void gpu_double_compute(void* stream, void* memory, const void* bytes, size_t num_bytes) {
  const std::string result(static_cast<const char*>(bytes), num_bytes);
  gpu_double::compute(stream, memory, num_bytes, [=] { memcpy(memory, result.data(), result.size()); });
}

// A line for each.
size_t gpu_double_calls(int gpu, char* to, size_t room) {
  std::string text;
  for (const std::string& call : gpu_double::calls(gpu)) text += call + "\n";
  return put(text, to, room);
}

size_t gpu_double_violations(char* to, size_t room) { return put(gpu_double::violations(), to, room); }

}  // extern "C"

#pragma GCC visibility pop
