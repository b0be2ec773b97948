// This process's rank and size, for the ops. Python sets them after init() and whenever process sets change.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace horovodlike_tensorflow {

// A process set as this rank sees it.
struct Membership {
  int32_t size = 0;
  int32_t place = -1;  // the position of this rank in the set; -1: it is not a member
};

struct Place {
  int32_t rank = -1;  // -1: not initialised
  int32_t local_rank = -1;
  int32_t local_size = 0;
};

class Job {
 public:
  static Job& current() {
    static Job* job = new Job;  // never destroyed: threads of TensorFlow may outlive main()
    return *job;
  }

  // Begins a job, or ends one if `place.rank` is -1. Forgets all process sets.
  void enter(const Place& place) {
    std::lock_guard<std::mutex> lock(mutex_);
    place_ = place;
    process_sets_.clear();
  }

  // A size of 0 removes the process set.
  void set_membership(int32_t process_set, const Membership& membership) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (membership.size > 0) {
      process_sets_[process_set] = membership;
    } else {
      process_sets_.erase(process_set);
    }
  }

  Place place() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return place_;
  }

  // Returns false if there is no such process set.
  bool find(int32_t process_set, Membership* membership) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = process_sets_.find(process_set);
    if (found == process_sets_.end()) return false;
    *membership = found->second;
    return true;
  }

 private:
  mutable std::mutex mutex_;
  Place place_;
  std::unordered_map<int32_t, Membership> process_sets_;
};

}  // namespace horovodlike_tensorflow
