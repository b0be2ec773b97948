// A thread that notifies TensorFlow of complete operations. TensorFlow may then free memory and start other kernels. On
// the engine's thread this would delay the engine, and with it the collectives of all ranks.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace horovodlike_tensorflow {

class Completions {
 public:
  using Call = std::function<void()>;

  static Completions& shared() {
    static Completions* completions = new Completions;  // never destroyed: the thread runs as long as the process
    return *completions;
  }

  // Callable from any thread, also from the engine's.
  void add(Call call) {
    bool was_empty = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      was_empty = calls_.empty();
      calls_.push_back(std::move(call));
    }
    if (was_empty) added_.notify_one();
  }

 private:
  Completions() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits this: signals go to Python's threads
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void run() {
    pthread_setname_np(pthread_self(), "hvl-tensorflow");
    std::vector<Call> taken;
    while (true) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [this] { return !calls_.empty(); });
        taken.swap(calls_);
      }
      for (Call& call : taken) call();
      taken.clear();
    }
  }

  std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::condition_variable added_;
  std::vector<Call> calls_;
};

}  // namespace horovodlike_tensorflow
