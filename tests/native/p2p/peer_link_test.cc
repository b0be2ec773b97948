// Two links, of two ranks, over shared memory and over each transport.
#include "p2p/peer_link.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "p2p/shm_stream.h"
#include "transports.h"

namespace hvl {
namespace {

constexpr uint64_t kSoon = 10 * kSecond;

// One rank: gives each message to the receive of its tag, or keeps it.
class Rank final : public MessageEvents {
 public:
  bool on_message(const MessageHeader& message, const char* payload) override {
    arrived.push_back(message.tag);
    const auto found = receives.find(message.tag);
    if (found == receives.end()) {
      kept += message.num_bytes;
      return false;
    }
    std::copy(payload, payload + message.num_bytes, found->second->data);
    on_end(*found->second, Status(), message);
    receives.erase(found);
    return true;
  }
  void on_announcement(const MessageHeader& message, const Announcement& announcement) override {
    arrived.push_back(message.tag);
    const auto found = receives.find(message.tag);
    if (found == receives.end()) {
      announced[message.tag] = {message, announcement};
      return;
    }
    link->request(announcement, message, std::move(found->second));
    receives.erase(found);
  }
  void on_end(const MessageRequest& request, Status status, const MessageHeader&) override {
    ended[request.handle] = status;
    order.push_back(request.handle);
  }

  std::unique_ptr<PeerLink> link;
  std::map<int64_t, MessageRequestPtr> receives;                        // by tag
  std::map<int64_t, std::pair<MessageHeader, Announcement>> announced;  // likewise
  std::vector<int64_t> arrived;                                         // tags
  std::map<int64_t, Status> ended;                                      // by handle
  std::vector<int64_t> order;                                           // handles as they ended
  uint64_t kept = 0;                                                    // bytes
};

MessageRequestPtr request(bool is_send, std::vector<char>* data, int64_t tag) {
  auto made = std::make_unique<MessageRequest>();
  made->is_send = is_send;
  made->header.tag = tag;
  made->header.num_bytes = data->size();
  made->data = data->data();
  made->handle = is_send ? tag : -tag;
  return made;
}

std::vector<char> pattern(size_t count, int seed) {
  std::vector<char> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>((i * 7919 + static_cast<size_t>(seed) * 131) >> 3);
  return bytes;
}

// Two ranks whose links are connected.
struct Pair {
  Rank ranks[2];
  std::shared_ptr<HostMemory> memory;
  int pid = 0;
  std::unique_ptr<RemoteRanks> remote;

  void connect() {
    for (int rank : {0, 1}) {
      std::unique_ptr<PeerStream> stream;
      std::optional<MessageKeys> keys;
      if (memory != nullptr) {
        stream = std::make_unique<ShmStream>(memory, rank, 1 - rank, pid);
      } else {
        stream = std::make_unique<MeshStream>(remote->message_stream(rank, 1 - rank, &keys), 1 - rank);
      }
      ranks[rank].link = std::make_unique<PeerLink>(1 - rank, RemoteRanks::name_of(1 - rank), std::move(stream),
                                                    keys.has_value() ? &*keys : nullptr, &ranks[rank]);
    }
  }
  void send(int rank, std::vector<char>* data, int64_t tag) { ranks[rank].link->send(request(true, data, tag)); }
  void receive(int rank, std::vector<char>* data, int64_t tag) {
    ranks[rank].receives[tag] = request(false, data, tag);
  }
  // A receive of a message that has been announced.
  void fetch(int rank, std::vector<char>* data, int64_t tag) {
    const auto found = ranks[rank].announced.find(tag);
    REQUIRE(found != ranks[rank].announced.end());
    ranks[rank].link->request(found->second.second, found->second.first, request(false, data, tag));
    ranks[rank].announced.erase(found);
  }
  bool progress() {
    bool progressed = false;
    for (Rank& rank : ranks) CHECK_EQ(rank.link->progress(&progressed).message(), "");
    return progressed;
  }
  // Progresses until is_done().
  template <typename IsDone>
  void run_until(IsDone&& is_done) {
    const uint64_t deadline = now_ns() + kSoon;
    while (!is_done()) {
      REQUIRE(now_ns() < deadline);
      if (!progress()) poll(nullptr, 0, 1);
    }
  }
  // Progresses until the link of rank 1 has an error, which it returns.
  Status run_until_broken() {
    const uint64_t deadline = now_ns() + kSoon;
    Status status;
    bool progressed = false;
    while (status.ok() && now_ns() < deadline) {
      CHECK(ranks[0].link->progress(&progressed).ok());
      status = ranks[1].link->progress(&progressed);
    }
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    return status;
  }
  void run_until_ended(size_t at_0, size_t at_1) {
    run_until([&] { return ranks[0].ended.size() >= at_0 && ranks[1].ended.size() >= at_1; });
  }
};

// Calls function(pair) over shared memory and over each transport.
template <typename Function>
void on_each_stream(Function&& function) {
  constexpr int kNone = 1 << 30;  // there is no such process, so nothing can be copied from its memory
  for (int pid : {0, static_cast<int>(getpid()), kNone}) {
    Pair pair;
    pair.memory = HostMemory::anonymous(HostShape{2, 4096, 4});
    pair.pid = pid;
    pair.connect();
    function(pair);
  }
  on_each_transport([&](const Wiring& wiring) {
    Pair pair;
    pair.remote = std::make_unique<RemoteRanks>(2, wiring);
    pair.connect();
    function(pair);
  });
}

TEST(messages_of_all_sizes_go_both_ways_at_the_same_time) {
  const std::vector<size_t> sizes = {0, 1, 4, kEagerBytes, kEagerBytes + 1, kFragmentBytes, (size_t{3} << 20) + 5};
  on_each_stream([&](Pair& pair) {
    std::vector<std::vector<char>> sent, received;
    sent.reserve(2 * sizes.size());
    received.reserve(2 * sizes.size());
    for (int rank : {0, 1}) {
      for (size_t index = 0; index < sizes.size(); ++index) {
        const int64_t tag = static_cast<int64_t>(index) + 1;
        sent.push_back(pattern(sizes[index], rank * 100 + static_cast<int>(index)));
        received.emplace_back(sizes[index], '\x55');
        pair.send(rank, &sent.back(), tag);
        pair.receive(1 - rank, &received.back(), tag);
      }
    }
    pair.run_until_ended(2 * sizes.size(), 2 * sizes.size());
    CHECK(sent == received);
    for (const Rank& rank : pair.ranks) {
      CHECK(!rank.link->has_requests());
      CHECK_EQ(rank.arrived.size(), sizes.size());
      CHECK(std::is_sorted(rank.arrived.begin(), rank.arrived.end()));
      for (const auto& [handle, status] : rank.ended) CHECK_EQ(status.message(), "");
    }
  });
}

TEST(a_large_message_waits_at_its_sender_and_a_small_one_overtakes_it) {
  on_each_stream([](Pair& pair) {
    std::vector<char> large = pattern(size_t{16} << 20, 1), small = pattern(4, 2), got_large(large.size()),
                      got_small(4);
    pair.send(0, &large, 1);
    pair.run_until([&] { return pair.ranks[1].announced.count(1) == 1; });
    CHECK(pair.ranks[0].link->has_requests());
    CHECK(pair.ranks[0].ended.empty());
    pair.fetch(1, &got_large, 1);
    pair.progress();
    pair.receive(1, &got_small, 2);
    pair.send(0, &small, 2);
    pair.run_until_ended(2, 2);
    CHECK(pair.ranks[1].order == std::vector<int64_t>({-2, -1}));
    CHECK(got_large == large);
    CHECK(got_small == small);
  });
}

TEST(large_messages_take_turns) {
  on_each_stream([](Pair& pair) {
    std::vector<char> longer(size_t{8} << 20), shorter(size_t{1} << 20), to_longer(longer.size()), to(shorter.size());
    pair.receive(1, &to_longer, 1);
    pair.receive(1, &to, 2);
    pair.send(0, &longer, 1);
    pair.send(0, &shorter, 2);
    pair.run_until_ended(2, 2);
    CHECK(pair.ranks[1].order == std::vector<int64_t>({-2, -1}));
  });
}

TEST(what_is_kept_without_a_receive_is_bounded) {
  constexpr int64_t kMessages = 400;
  on_each_stream([](Pair& pair) {
    std::vector<char> data = pattern(kEagerBytes, 3), received(kEagerBytes);
    for (int64_t tag = 1; tag <= kMessages; ++tag) pair.send(0, &data, tag);
    pair.run_until([&] { return pair.ranks[1].arrived.size() == kMessages; });
    CHECK(pair.ranks[1].kept <= kMessageCredit);
    CHECK(!pair.ranks[1].announced.empty());
    // They have come in the order of the sends, the announced ones, too.
    CHECK(std::is_sorted(pair.ranks[1].arrived.begin(), pair.ranks[1].arrived.end()));
    const size_t num_announced = pair.ranks[1].announced.size();
    while (!pair.ranks[1].announced.empty()) pair.fetch(1, &received, pair.ranks[1].announced.begin()->first);
    pair.run_until_ended(kMessages, num_announced);
    CHECK(received == data);
    // A receiver that gives the credit back gets messages at once again.
    for (size_t kept = kMessages - num_announced; kept > 0; --kept) pair.ranks[1].link->give_credit(kEagerBytes);
    pair.run_until([&] { return !pair.progress(); });
    pair.send(0, &data, kMessages + 1);
    pair.run_until([&] { return pair.ranks[1].arrived.size() == kMessages + 1; });
    CHECK(pair.ranks[1].announced.empty());
  });
}

// Sealed bytes wait in this process, where no descriptor shows them.
TEST(a_link_that_says_so_or_whose_descriptor_does_has_all_that_came) {
  constexpr size_t kMessages = 500;
  on_each_stream([](Pair& pair) {
    std::vector<char> data = pattern(4, 3);
    for (size_t tag = 1; tag <= kMessages; ++tag) pair.send(0, &data, static_cast<int64_t>(tag));
    bool progressed = false;
    const uint64_t deadline = now_ns() + kSoon;
    while (pair.ranks[1].arrived.size() < kMessages) {
      REQUIRE(now_ns() < deadline);
      CHECK_EQ(pair.ranks[0].link->progress(&progressed).message(), "");
      std::vector<pollfd> polled;
      pair.ranks[1].link->stream().add_to(&polled);
      if (pair.ranks[1].link->can_progress() || poll(polled.data(), polled.size(), 1) > 0) {
        CHECK_EQ(pair.ranks[1].link->progress(&progressed).message(), "");
      }
    }
  });
}

TEST(a_message_that_is_not_needed_ends_its_send) {
  on_each_stream([](Pair& pair) {
    std::vector<char> data(size_t{1} << 20);
    for (int64_t tag : {1, 2}) pair.send(0, &data, tag);
    pair.run_until([&] { return pair.ranks[1].announced.size() == 2; });
    pair.ranks[1].link->decline(pair.ranks[1].announced[1].second.id, MessageFrame::Kind::kDone);
    pair.ranks[1].link->decline(pair.ranks[1].announced[2].second.id, MessageFrame::Kind::kRemoved);
    pair.run_until_ended(2, 0);
    CHECK(pair.ranks[0].ended[1].ok());
    CHECK_EQ(pair.ranks[0].ended[2].code(), HVL_INVALID_ARGUMENT);
    CHECK(!pair.ranks[0].link->has_requests());
  });
}

TEST(an_answer_or_a_fragment_that_was_not_asked_for_breaks_the_job) {
  for (MessageFrame::Kind kind : {MessageFrame::Kind::kDone, MessageFrame::Kind::kRemoved}) {
    on_each_stream([&](Pair& pair) {
      pair.ranks[0].link->decline(7, kind);
      CHECK_HAS(pair.run_until_broken().message(), "rank 0 has sent an answer to a message that was not announced");
      CHECK(!pair.ranks[1].link->is_lost());
    });
  }
}

TEST(a_peer_that_is_gone_is_lost_after_its_last_message) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair;
    pair.remote = std::make_unique<RemoteRanks>(2, wiring);
    pair.connect();
    pair.remote->drop();
    std::vector<char> data = pattern(100, 1), received(100);
    pair.receive(1, &received, 1);
    pair.send(0, &data, 1);
    bool progressed = false;
    while (pair.ranks[0].ended.empty()) REQUIRE(pair.ranks[0].link->progress(&progressed).ok());
    pair.ranks[0].link = nullptr;
    const uint64_t deadline = now_ns() + kSoon;
    Status status;
    while (status.ok() && now_ns() < deadline) status = pair.ranks[1].link->progress(&progressed);
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_HAS(status.message(), "rank 0");
    CHECK(pair.ranks[1].link->is_lost());
    CHECK(received == data);
  });
}

TEST(the_last_frame_finishes_both_sides) {
  on_each_stream([](Pair& pair) {
    std::vector<char> data(10), received(10);
    pair.receive(1, &received, 1);
    pair.send(0, &data, 1);
    pair.ranks[0].link->finish();
    pair.run_until_ended(1, 1);
    CHECK(!pair.ranks[0].link->is_finished());
    pair.ranks[1].link->finish();
    pair.run_until([&] { return pair.ranks[0].link->is_finished() && pair.ranks[1].link->is_finished(); });
  });
}

TEST(the_last_frame_comes_behind_what_is_under_way_and_nothing_behind_it) {
  on_each_stream([](Pair& pair) {
    std::vector<char> large = pattern(size_t{8} << 20, 1), small(4), received(large.size()), never(4);
    large[0] = 1;
    pair.receive(1, &received, 1);
    pair.receive(1, &never, 2);
    pair.send(0, &large, 1);
    pair.run_until([&] { return received[0] == 1; });
    for (const Rank& rank : pair.ranks) rank.link->finish();
    pair.run_until([&] { return pair.ranks[1].link->is_finished(); });
    CHECK(received == large);
    pair.run_until([&] { return pair.ranks[0].link->is_finished(); });
    CHECK_EQ(pair.ranks[0].ended.at(1).message(), "");
    pair.send(0, &small, 2);
    pair.run_until([&] { return !pair.progress(); });
    CHECK_EQ(pair.ranks[1].arrived.size(), size_t{1});
    CHECK(pair.ranks[0].link->has_requests());
  });
}

TEST(a_rank_tells_its_peer_before_other_messages_why_the_job_is_broken) {
  for (size_t length : {size_t{0}, size_t{40}, size_t{32} << 10, size_t{100000}}) {
    on_each_stream([&](Pair& pair) {
      std::vector<char> small(4);
      pair.send(0, &small, 1);
      const std::string why(length, 'w');
      pair.ranks[0].link->tell_broken(why);
      const Status status = pair.run_until_broken();
      CHECK(!pair.ranks[1].link->is_lost());
      CHECK_EQ(status.message(), why.substr(0, kFragmentBytes));
      CHECK(pair.ranks[1].arrived.empty());
    });
  }
}

TEST(nothing_is_told_behind_the_last_frame_and_a_reason_that_was_not_sent_may_be_freed) {
  on_each_stream([](Pair& pair) {
    pair.ranks[0].link->finish();
    pair.run_until([&] { return !pair.progress(); });
    pair.ranks[0].link->tell_broken("too late");
    pair.run_until([&] { return !pair.progress(); });
    std::vector<char> large(size_t{8} << 20), received(large.size());
    pair.send(1, &large, 1);
    pair.receive(0, &received, 1);
    pair.run_until([&] { return pair.ranks[0].arrived.size() == 1; });
    pair.ranks[1].link->tell_broken(std::string(1000, 'w'));
    std::vector<MessageRequestPtr> requests;
    pair.ranks[1].link->take_all(&requests);
  });
}

TEST(a_frame_behind_the_last_one_breaks_the_job) {
  Pair pair;
  pair.memory = HostMemory::anonymous(HostShape{2, 4096, 4});
  pair.connect();
  pair.ranks[0].link->finish();
  pair.run_until([&] { return !pair.progress(); });
  char header[FrameCoder::kBytes];
  FrameCoder(nullptr, "rank 1").encode(MessageFrame(), header);
  pair.ranks[0].link->stream().send(header, sizeof header);
  CHECK_HAS(pair.run_until_broken().message(), "rank 0 has sent a frame behind its last one");
}

}  // namespace
}  // namespace hvl
