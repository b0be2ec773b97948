// A test double of the CUDA driver and of NCCL: a shared library with their functions, for processes without a GPU.
//
// Memory of the host stands in for that of GPUs. Streams are queues that one thread works off, as far as events, the
// other ranks and the test let it, so that work is as asynchronous as on a device. What the real libraries would not
// accept, or would do wrong without a word, is a violation: see violations(). Ranks are threads of one process.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace fake_gpu {

// Starts again with `num_gpus` separate GPUs. The library must not be in use meanwhile. Programs that do not call it
// get the number in the variable FAKE_GPU_COUNT.
void reset(int num_gpus);
// From now on the second GPU is the same as the first one.
void make_same(int gpu, int other);

// The operations of the ranks' programs.
void* make_stream(int gpu);
// Gives it to the stream: `work` reads or writes these bytes of memory when it is its turn.
void compute(void* stream, void* memory, size_t num_bytes, std::function<void()> work);
// The stream does not get on until it is released.
void hold(void* stream);
void release(void* stream);
void capture(void* stream, bool captures);
// The engines' streams of this GPU get on only if it does not hang.
void hang(int gpu, bool hangs);
// Whether the calling thread could have memory of a GPU now: not where that would become part of a graph.
bool may_allocate();
// Waits until the stream has done all it was given.
void synchronize(void* stream);

// The function fails from its next call for this GPU on, or returns to normal with a result of 0.
void fail(int gpu, const std::string& function, int result);
// Sets the result of ncclCommGetAsyncError() for this GPU's communicators from now on.
void set_async_error(int gpu, int result);
// Sets how often it first returns that it is in progress, after each call.
void set_polls(int count);
void set_nccl_version(int version);

// The calls for a GPU, in order: functions with their numbers, as "ncclAllReduce count=4 dtype=7 op=0", and the owner
// of the stream, as "cuStreamWaitEvent engine" and "cuEventRecord test". Queries are left out.
std::vector<std::string> calls(int gpu);
size_t count(int gpu, const std::string& beginning);  // of those that begin with this
// The forbidden operations so far, one per line; empty if there were none.
std::string violations();
// Objects that exist; streams are those of the engines.
int num_streams();
int num_communicators();
int num_contexts();
int num_pinned();
}  // namespace fake_gpu

#pragma GCC visibility pop
