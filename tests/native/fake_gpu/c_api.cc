// The test's functions for tests in Python, which call them through ctypes.

#include <cstring>

#include "fake_gpu.h"

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

void fake_gpu_reset(int num_gpus) { fake_gpu::reset(num_gpus); }
void* fake_gpu_make_stream(int gpu) { return fake_gpu::make_stream(gpu); }
void fake_gpu_hold(void* stream) { fake_gpu::hold(stream); }
void fake_gpu_release(void* stream) { fake_gpu::release(stream); }
void fake_gpu_capture(void* stream, int captures) { fake_gpu::capture(stream, captures != 0); }
void fake_gpu_synchronize(void* stream) { fake_gpu::synchronize(stream); }
void fake_gpu_fail(int gpu, const char* function, int result) { fake_gpu::fail(gpu, function, result); }

// Gives the stream a computation whose result, these bytes, is copied to memory when it is its turn.
void fake_gpu_compute(void* stream, void* memory, const void* bytes, size_t num_bytes) {
  const std::string result(static_cast<const char*>(bytes), num_bytes);
  fake_gpu::compute(stream, memory, num_bytes, [=] { memcpy(memory, result.data(), result.size()); });
}

// A line for each.
size_t fake_gpu_calls(int gpu, char* to, size_t room) {
  std::string text;
  for (const std::string& call : fake_gpu::calls(gpu)) text += call + "\n";
  return put(text, to, room);
}

size_t fake_gpu_violations(char* to, size_t room) { return put(fake_gpu::violations(), to, room); }

}  // extern "C"

#pragma GCC visibility pop
