// The state that both fake libraries share: GPUs, streams, and the thread that executes these.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake_gpu {

struct Gpu;
struct Stream;

struct Region {
  const char* begin;
  size_t num_bytes;
};

struct Event {
  Gpu* gpu = nullptr;
  // True if the stream has reached the last record of the event; null: it was not recorded. A waiter keeps the pointer
  // that it found, since the event may be recorded again, also on another stream.
  std::shared_ptr<bool> reached;
};

// One piece of work of a stream.
struct Work {
  std::function<bool()> run;    // false: not yet
  std::vector<Region> touched;  // memory that it reads or writes
  bool is_compute = false;      // of the test's
  const void* owner = nullptr;  // a communicator
  void* details = nullptr;      // its own
  uint64_t number = 0;          // in the order in which work is given to streams
};

struct Stream {
  Gpu* gpu = nullptr;
  bool is_tests = false;
  bool is_held = false;
  bool is_capturing = false;
  std::deque<Work> queue;
};

struct Gpu {
  int index = 0;
  int uuid = 0;
  int num_retained = 0;
  int async_error = 0;
  std::map<std::string, int> failures;
  std::vector<std::string> calls;
  Stream default_stream;
};

// All of it is guarded by its mutex.
class Machine {
 public:
  static Machine& get();

  std::mutex mutex;
  std::vector<std::unique_ptr<Gpu>> gpus;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<void*> pinned;
  std::string violations;
  std::set<uint64_t> unused_ids;  // of communicators without members
  int polls = 0;
  int nccl_version = 22703;

  void reset(int num_gpus);
  void violate(const std::string& text);
  // The failure that the test wants, else 0. Also notes the call.
  int call(Gpu* gpu, const std::string& function, const std::string& numbers = "");
  // Gives it to the stream, and has it worked on.
  void give(Stream* stream, Work work);
  // The thread is to look again.
  void wake() { changed_.notify_all(); }
  void synchronize(Stream* stream, std::unique_lock<std::mutex>* lock);
  // Until the condition holds, for some seconds at most: whether it does.
  bool wait(std::unique_lock<std::mutex>* lock, const std::function<bool()>& condition);

 private:
  Machine();
  void work();
  bool step();
  void check_ready(const Work& work) const;

  std::condition_variable changed_;
  uint64_t num_given_ = 0;
};

// The GPU whose context the calling thread has; a call without one is a violation and gets none.
Gpu* current_gpu(const char* function);

}  // namespace fake_gpu
