#include "machine.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "fake_gpu.h"

namespace fake_gpu {

namespace {

bool overlap(const Region& a, const Region& b) {
  return a.begin < b.begin + b.num_bytes && b.begin < a.begin + a.num_bytes;
}

}  // namespace

Machine& Machine::get() {
  static auto* machine = new Machine;
  return *machine;
}

Machine::Machine() {
  if (const char* number = std::getenv("FAKE_GPU_COUNT")) reset(std::atoi(number));
  std::thread([this] { work(); }).detach();
}

void Machine::reset(int num_gpus) {
  gpus.clear();
  for (int index = 0; index < num_gpus; ++index) {
    gpus.push_back(std::make_unique<Gpu>());
    gpus.back()->index = gpus.back()->uuid = index;
    gpus.back()->default_stream.gpu = gpus.back().get();
    gpus.back()->default_stream.is_tests = true;
  }
  for (Stream* stream : streams) delete stream;
  for (Event* event : events) delete event;
  streams.clear();
  events.clear();
  pinned.clear();
  violations.clear();
  unused_ids.clear();
  polls = 0;
  nccl_version = 22703;
}

void Machine::violate(const std::string& text) {
  std::fprintf(stderr, "violation: %s\n", text.c_str());
  violations += text + "\n";
}

int Machine::call(Gpu* gpu, const std::string& function, const std::string& numbers) {
  const bool asks =
      function == "cuEventQuery" || function == "cuStreamIsCapturing" || function == "ncclCommGetAsyncError";
  if (!asks) gpu->calls.push_back(function + numbers);
  const auto failure = gpu->failures.find(function);
  return failure == gpu->failures.end() ? 0 : failure->second;
}

void Machine::give(Stream* stream, Work work) {
  if (stream->is_capturing) violate("work was given to a stream that is captured");
  work.number = ++num_given_;
  stream->queue.push_back(std::move(work));
  wake();
}

void Machine::synchronize(Stream* stream, std::unique_lock<std::mutex>* lock) {
  changed_.wait(*lock, [&] { return stream->queue.empty(); });
}

bool Machine::wait(std::unique_lock<std::mutex>* lock, const std::function<bool()>& condition) {
  return changed_.wait_for(*lock, std::chrono::seconds(3), condition);
}

void Machine::work() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    while (step()) changed_.notify_all();
    changed_.wait(lock);
  }
}

// Work that the test gave to a stream earlier, and that is not done, may be work that this memory must wait for.
void Machine::check_ready(const Work& work) const {
  const auto check = [&](const Stream& stream) {
    for (const Work& other : stream.queue) {
      if (!other.is_compute || other.number >= work.number) continue;
      for (const Region& region : work.touched) {
        if (overlap(region, other.touched[0])) {
          Machine::get().violate("memory is used before the stream that works with it is done");
          return;
        }
      }
    }
  };
  if (work.is_compute) return;
  for (const Stream* stream : streams) check(*stream);
  for (const auto& gpu : gpus) check(gpu->default_stream);
}

bool Machine::step() {
  std::vector<Stream*> all(streams.begin(), streams.end());
  for (const auto& gpu : gpus) all.push_back(&gpu->default_stream);
  for (Stream* stream : all) {
    if (stream->is_held || stream->queue.empty()) continue;
    const Work given = stream->queue.front();  // it takes itself out of the queue
    if (!given.run()) continue;
    check_ready(given);
    return true;
  }
  return false;
}

// The test's functions.

namespace {

template <typename Function>
auto locked(Function&& function) {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  struct Wake {
    ~Wake() { Machine::get().wake(); }
  } wake;
  return function(machine);
}

Stream* stream_of(void* stream) { return static_cast<Stream*>(stream); }
Gpu& gpu_of(Machine& machine, int gpu) { return *machine.gpus.at(static_cast<size_t>(gpu)); }

}  // namespace

void reset(int num_gpus) {
  locked([&](Machine& machine) { machine.reset(num_gpus); });
}

void make_same(int gpu, int other) {
  locked([&](Machine& machine) { gpu_of(machine, other).uuid = gpu_of(machine, gpu).uuid; });
}

void* make_stream(int gpu) {
  return locked([&](Machine& machine) -> void* {
    auto* stream = new Stream;
    stream->gpu = &gpu_of(machine, gpu);
    stream->is_tests = true;
    machine.streams.insert(stream);
    return stream;
  });
}

void compute(void* stream, void* memory, size_t num_bytes, std::function<void()> work) {
  locked([&](Machine& machine) {
    Work given;
    given.is_compute = true;
    given.touched = {{static_cast<const char*>(memory), num_bytes}};
    given.run = [stream, work = std::move(work)] {
      work();
      stream_of(stream)->queue.pop_front();
      return true;
    };
    machine.give(stream_of(stream), std::move(given));
  });
}

void hold(void* stream) {
  locked([&](Machine&) { stream_of(stream)->is_held = true; });
}

void release(void* stream) {
  locked([&](Machine&) { stream_of(stream)->is_held = false; });
}

void hang(int gpu, bool hangs) {
  locked([&](Machine& machine) {
    for (Stream* stream : machine.streams) {
      if (!stream->is_tests && stream->gpu == &gpu_of(machine, gpu)) stream->is_held = hangs;
    }
  });
}

void capture(void* stream, bool captures) {
  locked([&](Machine&) { stream_of(stream)->is_capturing = captures; });
}

void synchronize(void* stream) {
  Machine& machine = Machine::get();
  std::unique_lock<std::mutex> lock(machine.mutex);
  machine.synchronize(stream_of(stream), &lock);
}

void fail(int gpu, const std::string& function, int result) {
  locked([&](Machine& machine) {
    if (result == 0) {
      gpu_of(machine, gpu).failures.erase(function);
    } else {
      gpu_of(machine, gpu).failures[function] = result;
    }
  });
}

void set_async_error(int gpu, int result) {
  locked([&](Machine& machine) { gpu_of(machine, gpu).async_error = result; });
}

void set_polls(int count) {
  locked([&](Machine& machine) { machine.polls = count; });
}

void set_nccl_version(int version) {
  locked([&](Machine& machine) { machine.nccl_version = version; });
}

std::vector<std::string> calls(int gpu) {
  return locked([&](Machine& machine) { return gpu_of(machine, gpu).calls; });
}

size_t count(int gpu, const std::string& beginning) {
  size_t found = 0;
  for (const std::string& call : calls(gpu)) found += call.compare(0, beginning.size(), beginning) == 0 ? 1 : 0;
  return found;
}

std::string violations() {
  return locked([](Machine& machine) {
    // NCCL has a thread for each that waits for the members for ever.
    if (!machine.unused_ids.empty()) machine.violate("an id was made for a communicator that nobody joins");
    machine.unused_ids.clear();
    return machine.violations;
  });
}

int num_streams() {
  return locked([](Machine& machine) {
    int count = 0;
    for (const Stream* stream : machine.streams) count += stream->is_tests ? 0 : 1;
    return count;
  });
}

int num_contexts() {
  return locked([](Machine& machine) {
    int count = 0;
    for (const auto& gpu : machine.gpus) count += gpu->num_retained;
    return count;
  });
}

int num_pinned() {
  return locked([](Machine& machine) { return static_cast<int>(machine.pinned.size()); });
}

}  // namespace fake_gpu
