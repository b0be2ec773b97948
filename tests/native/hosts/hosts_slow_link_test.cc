// A transfer that takes longer than the stall times, over a slow link between two of three hosts.
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "hosts_job.h"

namespace hvl {
namespace {

// A pair of sockets between which a thread passes on bytes, up to `limit` bytes each way.
class SlowLink {
 public:
  explicit SlowLink(size_t limit) : left_{limit, limit} {}
  ~SlowLink() {
    is_over_ = true;
    if (thread_.joinable()) thread_.join();
    for (int end : inner_) close(end);
  }
  SlowLink(const SlowLink&) = delete;
  SlowLink& operator=(const SlowLink&) = delete;

  void make_ends(int* ends) {
    for (int i : {0, 1}) {
      int pair[2];
      make_pair_of_ends(pair);
      ends[i] = pair[0];
      inner_[i] = pair[1];
    }
    thread_ = std::thread([this] {
      while (!is_over_) {
        pass_on(0);
        pass_on(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
  }

 private:
  void pass_on(int from) {
    char bytes[1024];
    const ssize_t count = recv(inner_[from], bytes, std::min(sizeof bytes, left_[from]), MSG_DONTWAIT);
    if (count <= 0) return;
    left_[from] -= static_cast<size_t>(count);
    for (ssize_t sent = 0; sent < count && !is_over_;) {
      const ssize_t more = send(inner_[1 - from], bytes + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
      if (more > 0) sent += more;
      if (more <= 0) std::this_thread::yield();
    }
  }

  size_t left_[2];
  int inner_[2] = {-1, -1};
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

constexpr int64_t kCount = 800000;  // of floats: 6 s, also longer than the patience with a silent coordinator

// Ranks 0 and 1 share a host. The link from rank 0 to rank 3 is slow: all others have their data at once, and wait for
// both in the collective that follows.
void check_broadcast(size_t limit, const std::function<void(const Status&)>& check_end) {
  SlowLink link(limit);
  Wiring wiring;
  wiring.data_ends = [&link, count = 0](int* ends) mutable {
    count++ == 1 ? link.make_ends(ends) : make_pair_of_ends(ends);
  };
  EngineOptions options = on_hosts({0, 0, 1, 2});
  options.stall_warning = 0;
  options.stall_shutdown = 2;
  Job job(4, options, 4096, 4, wiring);
  job.on_all([&](int rank) {
    std::vector<float> data(kCount, static_cast<float>(rank + 7));
    Status status = job.run(rank, make("large", HVL_BROADCAST, {{kCount}}, HVL_SUM, 0), data.data());
    if (status.ok()) CHECK_EQ(data.back(), 7.0F);
    float more = 1;
    if (status.ok()) status = job.run(rank, make("after", HVL_ALLREDUCE, {{1}}), &more);
    check_end(status);
  });
}

TEST(a_transfer_that_takes_longer_than_the_stall_time_is_no_stall_on_any_host) {
  check_broadcast(SIZE_MAX, [](const Status& status) { CHECK_EQ(status.message(), ""); });
}

TEST(a_transfer_that_stops_is_a_stall) {
  check_broadcast(100000, [](const Status& status) { CHECK_HAS(status.message(), "stalled: "); });
}

}  // namespace
}  // namespace hvl
