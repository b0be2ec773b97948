// Messages between the engines of a job: on one host and on several, from several threads.
#include "p2p/messenger.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "hosts_job.h"
#include "wiretap.h"

namespace hvl {
namespace {

MessageRequestPtr request(bool is_send, std::vector<char>* data, int peer, int64_t tag) {
  auto made = std::make_unique<MessageRequest>();
  made->is_send = is_send;
  made->peer = peer;
  made->header.tag = tag;
  made->header.num_bytes = data->size();
  made->data = data->data();
  return made;
}

int64_t post(Job* job, int rank, bool is_send, std::vector<char>* data, int peer, int64_t tag) {
  int64_t handle = 0;
  CHECK_EQ(job->engine(rank).post(request(is_send, data, peer, tag), &handle).message(), "");
  return handle;
}

std::vector<char> text(size_t count, int seed) {
  std::vector<char> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>((i * 7919 + static_cast<size_t>(seed) * 131) >> 3);
  return bytes;
}

// Messages of many sizes in a ring, beside allreduces of another thread.
void talk(Job* job, int rank, int rounds) {
  const int size = job->size(), next = (rank + 1) % size, before = (rank + size - 1) % size;
  std::thread reducing([&] {
    for (int round = 0; round < rounds; ++round) {
      std::vector<float> data(1000, 1);
      CHECK_EQ(job->run(rank, make("sum", HVL_ALLREDUCE, {{1000}}), data.data()).message(), "");
      CHECK_EQ(data[7], static_cast<float>(size));
    }
  });
  for (int round = 0; round < rounds; ++round) {
    const size_t count =
        std::vector<size_t>{0, 4, kEagerBytes, kEagerBytes + 1, 300007}[static_cast<size_t>(round) % 5];
    std::vector<char> sent = text(count, rank), received(count);
    const int source = round % 2 == 0 ? before : kAnySource;
    const int64_t receive = post(job, rank, false, &received, source, round);
    const int64_t send = post(job, rank, true, &sent, next, round);
    CHECK_EQ(job->wait(rank, send).message(), "");
    CHECK_EQ(job->wait(rank, receive).message(), "");
    CHECK(received == text(count, before));
  }
  reducing.join();
}

TEST(messages_beside_collectives_on_one_host) {
  for (int size : {1, 2, 3}) {
    Job job(size);
    job.on_all([&](int rank) { talk(&job, rank, check::is_brief ? 20 : 100); });
  }
}

TEST(messages_beside_collectives_on_several_hosts) {
  on_all_places([](Job& job) { job.on_all([&](int rank) { talk(&job, rank, 10); }); });
}

// The other sends wait, and keep their own memory.
TEST(what_is_kept_of_a_rank_for_itself_is_bounded) {
  constexpr size_t kMost = kMessageCredit / credit_of(kEagerBytes), kMessages = 3 * kMost;
  Job job(1);
  const auto num_complete = [&](const std::vector<int64_t>& handles) {
    return static_cast<size_t>(std::count_if(handles.begin(), handles.end(),
                                             [&](int64_t handle) { return job.handles(0).poll(handle) == HVL_OK; }));
  };
  for (int round = 0; round < 2; ++round) {  // the second with the credit of the first
    std::vector<std::vector<char>> sent, received(kMessages, std::vector<char>(kEagerBytes));
    for (size_t i = 0; i < kMessages; ++i) sent.push_back(text(kEagerBytes, static_cast<int>(i) + round));
    std::vector<int64_t> sends, receives;
    for (std::vector<char>& data : sent) sends.push_back(post(&job, 0, true, &data, 0, 1));
    const int64_t last = post(&job, 0, true, &sent[0], 0, 2);
    CHECK_EQ(job.wait(0, post(&job, 0, false, &received[0], 0, 2)).message(), "");  // all before have begun
    CHECK_EQ(job.wait(0, last).message(), "");
    CHECK_EQ(num_complete(sends), kMost);
    for (std::vector<char>& data : received) receives.push_back(post(&job, 0, false, &data, 0, 1));
    for (int64_t handle : receives) CHECK_EQ(job.wait(0, handle).message(), "");
    for (int64_t handle : sends) CHECK_EQ(job.wait(0, handle).message(), "");
    CHECK(received == sent);
  }
}

// The messages of a rank that has no engine: one of two on a host.
class Talker {
 public:
  Talker(const std::shared_ptr<HostMemory>& memory, int rank)
      : peer_(1 - rank), messenger_([&] {
          MessengerOptions options;
          options.size = 2;
          options.rank = options.local_rank = rank;
          options.local_ranks = {0, 1};
          options.describe = [](int of) { return "rank " + std::to_string(of); };
          options.memory = memory;
          options.handles = &handles_;
          return options;
        }()) {}

  int64_t post(bool is_send, std::vector<char>* data) {
    int64_t handle = 0;
    CHECK_EQ(messenger_.post(request(is_send, data, peer_, 1), &handle).message(), "");
    progress();
    return handle;
  }
  void progress() {
    bool progressed = false;
    CHECK_EQ(messenger_.progress(&progressed).message(), "");
  }
  bool is_complete(int64_t handle) { return handles_.poll(handle) == HVL_OK; }
  Messenger& messenger() { return messenger_; }

 private:
  const int peer_;
  HandleTable handles_;
  Messenger messenger_;
};

TEST(messages_that_no_request_awaits_wake_an_engine_when_they_fill_half_of_the_ring) {
  const std::shared_ptr<HostMemory> memory = HostMemory::anonymous(HostShape{2, 4096, 4});
  Talker sender(memory, 0), receiver(memory, 1);
  Doorbell& doorbell = memory->rank(1).doorbell;
  const size_t capacity = memory->message_ring(0, 1).capacity;
  std::vector<char> sent = text(kEagerBytes, 1), received(kEagerBytes);
  doorbell.arm(WaitingParty::kEngineThread, kWakeNews);
  size_t num_bytes = 0;
  for (; doorbell.notifications(WaitingParty::kEngineThread) == 0; num_bytes += credit_of(kEagerBytes)) {
    REQUIRE(num_bytes < capacity);
    CHECK(sender.is_complete(sender.post(true, &sent)));
  }
  CHECK(receiver.messenger().has_news());
  CHECK(num_bytes > capacity / 2);
  CHECK(num_bytes < capacity / 2 + 2 * credit_of(kEagerBytes));
  CHECK(!receiver.messenger().awaits_peers());
  for (; num_bytes > 0; num_bytes -= credit_of(kEagerBytes)) {
    CHECK(receiver.is_complete(receiver.post(false, &received)));
    CHECK(received == sent);
  }
  const int64_t receive = receiver.post(false, &received);
  CHECK(receiver.messenger().awaits_peers());
  doorbell.arm(WaitingParty::kEngineThread, kWakeNews | kWakeMessage);
  sender.post(true, &sent);
  CHECK_EQ(doorbell.notifications(WaitingParty::kEngineThread), 2u);
  CHECK(receiver.messenger().has_news());
  receiver.progress();
  CHECK(receiver.is_complete(receive));
}

TEST(a_small_send_does_not_wait_for_its_receive_when_those_before_have_been_received) {
  const std::shared_ptr<HostMemory> memory = HostMemory::anonymous(HostShape{2, 4096, 4});
  Talker sender(memory, 0), receiver(memory, 1);
  std::vector<char> sent = text(kEagerBytes, 1), received(kEagerBytes);
  for (size_t count = 0; count < kMessageCredit / credit_of(kEagerBytes); ++count) {
    CHECK(sender.is_complete(sender.post(true, &sent)));
    CHECK(receiver.is_complete(receiver.post(false, &received)));
  }
  CHECK(sender.is_complete(sender.post(true, &sent)));
}

TEST(what_was_sent_before_a_rank_shuts_down_is_received_also_later) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    Job job(2, on_hosts(hosts));
    std::vector<char> sent = text(4, 1), first(4), second(4), third(4);
    CHECK_EQ(job.wait(0, post(&job, 0, true, &sent, 1, 1)).message(), "");
    CHECK_EQ(job.wait(0, post(&job, 0, true, &sent, 1, 2)).message(), "");
    const int64_t early = post(&job, 1, false, &first, 0, 1), never = post(&job, 1, false, &third, 0, 3);
    job.shut_down();
    CHECK_EQ(job.wait(1, early).message(), "");
    CHECK_EQ(job.wait(1, never).code(), HVL_SHUT_DOWN);
    CHECK_EQ(job.wait(1, post(&job, 1, false, &second, 0, 2)).message(), "");
    CHECK_EQ(job.wait(1, post(&job, 1, false, &second, 0, 2)).code(), HVL_SHUT_DOWN);
    CHECK_EQ(job.wait(1, post(&job, 1, true, &second, 0, 2)).code(), HVL_SHUT_DOWN);
    CHECK(first == sent);
    CHECK(second == sent);
  }
}

// Each rank has the last frames of all others by then, also of those of its own host, which no socket announces.
TEST(a_job_of_several_hosts_shuts_down_at_once) {
  Job job(4, on_hosts({0, 0, 1, 1}));
  job.on_all([&](int rank) { talk(&job, rank, 1); });
  const uint64_t begin = now_ns();
  job.shut_down();
  CHECK(now_ns() - begin < kLeaveTimeout / 2);
}

TEST(a_changed_header_breaks_the_job) {
  for (bool seals : {false, true}) {
    for (uint64_t changed : {uint64_t{0}, uint64_t{20}, uint64_t{60}}) {
      Wiretap tap(
          [&](uint64_t position, char byte) { return position == changed ? static_cast<char>(byte ^ 1) : byte; });
      Wiring wiring;
      wiring.seals_data = seals;
      wiring.message_ends = [&](int* ends) { tap.make_ends(ends); };
      Job job(2, on_hosts({0, 1}), 4096, 4, wiring);
      std::vector<char> data(100000), received(data.size());
      const int64_t receive = post(&job, 1, false, &received, 0, 1), send = post(&job, 0, true, &data, 1, 1);
      for (const Status& status : {job.wait(1, receive), job.wait(0, send)}) {
        CHECK_EQ(status.code(), HVL_JOB_BROKEN);
        CHECK_HAS(status.message(), "MAC");
        CHECK_HAS(status.message(), "rank 0 on host a");
      }
    }
  }
}

TEST(a_changed_header_breaks_a_job_that_awaits_no_message) {
  for (bool seals : {false, true}) {
    Wiretap tap([&](uint64_t position, char byte) { return position == 0 ? static_cast<char>(byte ^ 1) : byte; });
    Wiring wiring;
    wiring.seals_data = seals;
    wiring.message_ends = [&](int* ends) { tap.make_ends(ends); };
    Job job(2, on_hosts({0, 1}), 4096, 4, wiring);
    std::vector<char> data(100);
    float sum = 1;
    char* address = reinterpret_cast<char*>(&sum);
    const int64_t waiting = job.enqueue(1, make("w", HVL_ALLREDUCE, {{1}}), {address}, {address});
    CHECK_EQ(job.wait(0, post(&job, 0, true, &data, 1, 1)).message(), "");
    const Status status = job.wait(1, waiting);
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_HAS(status.message(), "MAC");
  }
}

TEST(a_rank_whose_connections_are_cut_fails_those_that_need_it) {
  Job job(2, on_hosts({0, 1}));
  std::vector<char> data(100000);
  const int64_t receive = post(&job, 1, false, &data, 0, 1);
  job.cut_off(0);
  CHECK_EQ(job.wait(1, receive).code(), HVL_JOB_BROKEN);
}

}  // namespace
}  // namespace hvl
