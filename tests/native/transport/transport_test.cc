// The guarantees of transport/transport.h, checked over each transport.
#include "transport/transport.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "transports.h"

namespace hvl {
namespace {

constexpr uint64_t kSoon = 10 * kSecond;        // far more than any transport takes for what can be done at once
constexpr uint64_t kBrief = 20 * kMillisecond;  // in which a thread falls asleep
constexpr size_t kTooMuch = size_t{16} << 20;   // more than any transport takes while the peer receives nothing
const std::vector<size_t> kSizes = {1, 7, 1009, 65536, 70001, (size_t{3} << 20) + 1};

std::vector<char> pattern(size_t count, int seed) {
  std::vector<char> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>((i * 7919 + static_cast<size_t>(seed) * 131) >> 3);
  return bytes;
}

void sleep_on(std::vector<pollfd> polled, int milliseconds) { poll(polled.data(), polled.size(), milliseconds); }

// Lets all meshes move what they can until is_done(), and sleeps on the first one's descriptors where none can.
template <typename IsDone>
void move_until(const std::vector<Mesh*>& meshes, IsDone&& is_done) {
  const uint64_t deadline = now_ns() + kSoon;
  while (!is_done()) {
    bool moved = false;
    for (Mesh* mesh : meshes) REQUIRE(CHECK_EQ(mesh->progress(&moved).message(), ""));
    if (moved || is_done()) continue;
    REQUIRE(now_ns() < deadline);
    std::vector<pollfd> polled;
    meshes[0]->add_to(&polled);
    sleep_on(polled, 1);
  }
}

void move_all(const std::vector<Mesh*>& meshes) {
  move_until(meshes, [&] {
    return std::all_of(meshes.begin(), meshes.end(), [](const Mesh* mesh) { return mesh->is_idle(); });
  });
}

// Moves what can be moved until the mesh fails.
Status move_until_lost(Mesh* mesh) {
  const uint64_t deadline = now_ns() + kSoon;
  for (;;) {
    bool moved = false;
    const Status status = mesh->progress(&moved);
    if (!status.ok()) return status;
    REQUIRE(!mesh->is_idle() && now_ns() < deadline);
    std::vector<pollfd> polled;
    mesh->add_to(&polled);
    if (!moved) sleep_on(polled, 1000);
  }
}

void check_lost(const Status& status, int rank) {
  CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  CHECK_HAS(status.message(), RemoteRanks::name_of(rank));
}

TEST(data_of_all_sizes_between_several_ranks_comes_in_order) {
  constexpr int kRanks = 3;
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(kRanks, wiring);
    std::vector<std::unique_ptr<Mesh>> owned;
    std::vector<Mesh*> meshes;
    for (int rank = 0; rank < kRanks; ++rank) {
      owned.push_back(ranks.mesh_of(rank));
      meshes.push_back(owned.back().get());
    }
    const auto seed_of = [](int from, int to, size_t turn) { return 100 * from + 10 * to + static_cast<int>(turn); };
    std::vector<std::vector<char>> sent, received, expected;
    for (int from = 0; from < kRanks; ++from) {
      for (int to = 0; to < kRanks; ++to) {
        for (size_t turn = 0; turn < kSizes.size() && from != to; ++turn) {
          sent.push_back(pattern(kSizes[turn], seed_of(from, to, turn)));
          received.emplace_back(kSizes[turn], '\x55');
          const auto send = [&](size_t begin, size_t end) {
            meshes[from]->send(to, turn, sent.back().data() + begin, end - begin);
          };
          const auto receive = [&](size_t begin, size_t end) {
            meshes[to]->receive(from, turn, received.back().data() + begin, end - begin);
          };
          // The two sides need not agree on pieces.
          send(0, kSizes[turn] / 3);
          send(kSizes[turn] / 3, kSizes[turn]);
          receive(0, 1);
          receive(1, kSizes[turn]);
        }
      }
    }
    expected = sent;
    move_all(meshes);
    CHECK(received == expected);
    CHECK(sent == expected);
  });
}

TEST(positions_count_the_bytes_of_a_direction) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(2, wiring);
    const auto a = ranks.mesh_of(0), b = ranks.mesh_of(1);
    char bytes[10] = "123456789";
    char got[10] = {};
    CHECK(a->is_idle());
    CHECK_EQ(a->send(1, 0, bytes, 0), uint64_t{0});
    CHECK(a->is_idle());
    CHECK(a->has_sent(1, 0, 0));
    CHECK_EQ(a->send(1, 0, bytes, 4), uint64_t{4});
    CHECK_EQ(a->send(1, 0, bytes + 4, 0), uint64_t{4});
    CHECK_EQ(b->receive(0, 0, got, 4), uint64_t{4});
    CHECK_EQ(b->receive(0, 0, got + 4, 6), uint64_t{10});
    CHECK(!a->has_sent(1, 0, 4));
    CHECK(!b->has_received(0, 0, 1));
    move_until({b.get(), a.get()}, [&] { return b->has_received(0, 0, 4); });
    CHECK(a->has_sent(1, 0, 4));
    CHECK(a->is_idle());
    CHECK(!b->has_received(0, 0, 5));
    CHECK(!b->is_idle());
    CHECK_EQ(a->send(1, 0, bytes + 4, 6), uint64_t{10});
    move_all({b.get(), a.get()});
    CHECK(b->has_received(0, 0, 10));
    CHECK_EQ(std::string(got), "123456789");
    CHECK_EQ(b->receive(0, 0, got, 0), uint64_t{10});
  });
}

TEST(data_waits_until_its_receiver_asks_for_it) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(2, wiring);
    const auto a = ranks.mesh_of(0), b = ranks.mesh_of(1);
    const std::vector<char> sent = pattern(kTooMuch, 1);
    std::vector<char> received(kTooMuch);
    const uint64_t end = a->send(1, 0, sent.data(), sent.size());
    for (int quiet = 0; quiet < 3;) {
      bool moved = false;
      REQUIRE(a->progress(&moved).ok() && b->progress(&moved).ok());
      quiet = moved ? 0 : quiet + 1;
      if (!moved) sleep_on({}, 5);
    }
    CHECK(!a->has_sent(1, 0, end));
    CHECK(b->is_idle());
    CHECK_EQ(a->awaited(), "rank 1");
    b->receive(0, 0, received.data(), received.size());
    move_all({b.get(), a.get()});
    CHECK(received == sent);
  });
}

TEST(the_ranks_that_do_not_send_are_named_once) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(3, wiring);
    const auto mesh = ranks.mesh_of(0), one = ranks.mesh_of(1), two = ranks.mesh_of(2);
    char bytes[4];
    CHECK_EQ(mesh->awaited(), "");
    for (uint64_t turn : {0, 1}) mesh->receive(2, turn, bytes + turn, 1);
    CHECK_EQ(mesh->awaited(), "rank 2");
    for (uint64_t turn : {0, 1}) mesh->receive(1, turn, bytes + 2 + turn, 1);
    CHECK_EQ(mesh->awaited(), "rank 1, rank 2");
  });
}

TEST(the_ranks_that_do_not_receive_are_named_if_everything_has_come) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(3, wiring);
    const auto mesh = ranks.mesh_of(0), one = ranks.mesh_of(1), two = ranks.mesh_of(2);
    const std::vector<char> sent(kTooMuch);
    char received;
    mesh->send(1, 0, sent.data(), sent.size());
    bool moved = false;
    CHECK(mesh->progress(&moved).ok());
    CHECK_EQ(mesh->awaited(), "rank 1");
    mesh->receive(2, 0, &received, 1);
    CHECK_EQ(mesh->awaited(), "rank 2");
  });
}

TEST(a_lost_rank_is_an_error_for_transfers_with_it_only) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(3, wiring);
    const auto a = ranks.mesh_of(0), c = ranks.mesh_of(2);
    auto lost = ranks.mesh_of(1);
    ranks.drop();
    lost = nullptr;
    const std::vector<char> sent = pattern(kTooMuch, 1);
    std::vector<char> received(kTooMuch);
    a->send(2, 0, sent.data(), sent.size());
    c->receive(0, 0, received.data(), received.size());
    move_all({c.get(), a.get()});
    CHECK(received == sent);
    a->receive(1, 0, received.data(), 1);
    check_lost(move_until_lost(a.get()), 1);
    c->send(1, 0, sent.data(), sent.size());
    check_lost(move_until_lost(c.get()), 1);
  });
}

TEST(the_bytes_that_a_rank_sent_before_it_was_lost_arrive) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(2, wiring);
    const auto a = ranks.mesh_of(0);
    auto lost = ranks.mesh_of(1);
    ranks.drop();
    const std::vector<char> sent = pattern(1000, 1);
    std::vector<char> received(1001);
    lost->send(0, 0, sent.data(), sent.size());
    move_all({lost.get()});
    lost = nullptr;
    a->receive(1, 0, received.data(), 1000);
    move_all({a.get()});
    CHECK(std::equal(sent.begin(), sent.end(), received.begin()));
    a->receive(1, 0, received.data() + 1000, 1);
    check_lost(move_until_lost(a.get()), 1);
  });
}

TEST(a_rank_that_is_cut_off_loses_all_others) {
  on_each_transport([](const Wiring& wiring) {
    RemoteRanks ranks(2, wiring);
    const auto a = ranks.mesh_of(0), b = ranks.mesh_of(1);
    char byte;
    a->receive(1, 0, &byte, 1);
    b->receive(0, 0, &byte, 1);
    bool moved = false;
    CHECK(a->progress(&moved).ok() && b->progress(&moved).ok());
    ranks.cut_off(0);
    check_lost(move_until_lost(a.get()), 1);
    check_lost(move_until_lost(b.get()), 0);
  });
}

// A rank that sleeps on the descriptors of its mesh until it has nothing left to move, or fails.
class SleepingRank {
 public:
  explicit SleepingRank(Mesh* mesh) : thread_([this, mesh] { run(mesh); }) {}
  ~SleepingRank() { thread_.join(); }
  SleepingRank(const SleepingRank&) = delete;
  SleepingRank& operator=(const SleepingRank&) = delete;

  bool is_done() const { return is_done_; }

 private:
  void run(Mesh* mesh) {
    const uint64_t deadline = now_ns() + kSoon;
    Status status;
    while (status.ok() && !mesh->is_idle() && now_ns() < deadline) {
      bool moved = false;
      status = mesh->progress(&moved);
      if (moved || !status.ok()) continue;
      std::vector<pollfd> polled;
      mesh->add_to(&polled);
      sleep_on(polled, 2 * static_cast<int>(kSoon / kMillisecond));
    }
    CHECK(now_ns() < deadline);
    is_done_ = true;
  }

  std::atomic<bool> is_done_{false};
  std::thread thread_;
};

TEST(a_sleeping_rank_wakes_when_something_comes_or_goes_or_its_peer_is_lost) {
  on_each_transport([](const Wiring& wiring) {
    for (const char* event : {"data", "room", "loss", "own loss"}) {
      RemoteRanks ranks(2, wiring);
      const auto a = ranks.mesh_of(0);
      auto b = ranks.mesh_of(1);
      const std::vector<char> sent = pattern(kTooMuch, 1);
      std::vector<char> received(kTooMuch);
      const std::string name = event;
      if (name == "room") {
        a->send(1, 0, sent.data(), sent.size());
      } else {
        a->receive(1, 0, received.data(), 100);
      }
      SleepingRank asleep(a.get());
      sleep_on({}, static_cast<int>(kBrief / kMillisecond));
      CHECK(!asleep.is_done());
      if (name == "room") {
        b->receive(0, 0, received.data(), received.size());
        move_all({b.get()});
        CHECK(received == sent);
      }
      if (name == "data") {
        b->send(0, 0, sent.data(), 100);
        move_all({b.get()});
      }
      if (name == "loss") ranks.cut_off(1);
      if (name == "own loss") ranks.cut_off(0);
    }
  });
}

// Pumps all until is_done(), and sleeps on the first one's descriptor where none can do anything.
template <typename IsDone>
void pump_until(const std::vector<Connection*>& connections, IsDone&& is_done) {
  const uint64_t deadline = now_ns() + kSoon;
  while (!is_done()) {
    bool progressed = false;
    for (Connection* each : connections) REQUIRE(CHECK_EQ(each->pump(&progressed).message(), ""));
    REQUIRE(now_ns() < deadline);
    if (!progressed && !is_done()) sleep_on({{connections[0]->fd(), POLLIN, 0}}, 1);
  }
}

std::string next_of(Connection* connection) {
  std::string frame;
  pump_until({connection}, [&] { return connection->has_frame(); });
  CHECK(connection->receive(&frame));
  return frame;
}

Status pump_until_lost(Connection* connection) {
  const uint64_t deadline = now_ns() + kSoon;
  for (;;) {
    bool progressed = false;
    const Status status = connection->pump(&progressed);
    if (!status.ok()) return status;
    REQUIRE(!connection->has_frame() && now_ns() < deadline);
    if (!progressed) sleep_on({{connection->fd(), POLLIN, 0}}, 1000);
  }
}

struct Pair {
  explicit Pair(const Wiring& wiring) : ranks(2, wiring), a(ranks.connect(0, 1)), b(ranks.connect(1, 0)) {
    ranks.drop();
  }

  RemoteRanks ranks;
  std::unique_ptr<Connection> a, b;
};

TEST(frames_of_all_sizes_both_ways_at_once) {
  on_each_transport([](const Wiring& wiring) {
    const auto run = [](Connection* connection) {
      constexpr size_t kCount = 600;
      const auto frame_of = [](size_t i) { return std::string(i * i % 70001, static_cast<char>(i)); };
      size_t num_sent = 0;
      size_t num_received = 0;
      while (num_sent < kCount || !connection->has_ended() || !connection->is_flushed()) {
        if (num_sent < kCount && connection->is_flushed()) connection->send(frame_of(num_sent++));
        if (num_sent == kCount) connection->finish();
        bool progressed = false;
        const Status status = connection->pump(&progressed);
        REQUIRE(CHECK_EQ(status.message(), ""));
        std::string frame;
        for (; connection->receive(&frame); ++num_received) REQUIRE(frame == frame_of(num_received));
        if (progressed || (connection->is_flushed() && (num_sent < kCount || connection->has_ended()))) continue;
        sleep_on({{connection->fd(), POLLIN, 0}}, 1);
      }
      CHECK_EQ(num_received, kCount);
    };
    const auto guarded = [&](Connection* connection) {
      try {
        run(connection);
      } catch (const check::RequirementFailed&) {  // already reported
      }
    };
    Pair pair(wiring);
    std::thread other([&] { guarded(pair.b.get()); });
    guarded(pair.a.get());
    other.join();
  });
}

TEST(a_peer_that_does_not_read_holds_up_its_sender_only) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    constexpr size_t kCount = 20;
    for (size_t i = 0; i < kCount; ++i) pair.a->send(std::string(1 << 20, static_cast<char>(i)));
    pair.a->finish();
    int pumps = 0;
    for (bool progressed = true; progressed; ++pumps) {
      progressed = false;
      CHECK(pair.a->pump(&progressed).ok());
    }
    CHECK(pumps > 1);
    CHECK(!pair.a->is_flushed());
    std::string frame;
    size_t count = 0;
    pump_until({pair.b.get(), pair.a.get()}, [&] {
      for (; pair.b->receive(&frame); ++count) CHECK(frame == std::string(1 << 20, static_cast<char>(count)));
      return pair.b->has_ended();
    });
    CHECK_EQ(count, kCount);
    CHECK(pair.a->is_flushed());
  });
}

TEST(nothing_is_received_while_a_frame_waits) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    constexpr size_t kCount = 100;
    for (size_t i = 0; i < kCount; ++i) pair.a->send(std::string(size_t{200} << 10, static_cast<char>(i)));
    pump_until({pair.b.get(), pair.a.get()}, [&] { return pair.b->has_frame(); });
    for (int quiet = 0; quiet < 3;) {
      bool progressed = false;
      REQUIRE(pair.a->pump(&progressed).ok());
      if (!progressed) CHECK(pair.b->pump(&progressed).ok());
      quiet = progressed ? 0 : quiet + 1;
      if (!progressed) sleep_on({}, 5);
    }
    CHECK(!pair.a->is_flushed());
    std::string frame;
    size_t count = 0;
    pump_until({pair.b.get(), pair.a.get()}, [&] {
      for (; pair.b->receive(&frame); ++count) CHECK_EQ(frame[0], static_cast<char>(count));
      return count == kCount;
    });
  });
}

TEST(the_longest_frame_and_one_that_is_too_long) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    const std::string longest(kFrameLimit, 'x');
    pair.a->send("");
    pair.a->send(longest);
    std::string frame = "none";
    pump_until({pair.b.get(), pair.a.get()}, [&] { return pair.b->has_frame(); });
    CHECK(pair.b->receive(&frame));
    CHECK_EQ(frame, "");
    pump_until({pair.b.get(), pair.a.get()}, [&] { return pair.b->has_frame(); });
    CHECK(pair.b->receive(&frame));
    CHECK(frame == longest);
    pair.a->send(longest + 'x');
    bool progressed = false;
    const Status status = pair.a->pump(&progressed);
    check_lost(status, 1);
    CHECK_HAS(status.message(), "a frame of 16777217 bytes");
    CHECK(pair.a->is_over());
  });
}

TEST(an_end_closes_one_direction_and_both_end_the_connection) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    pair.a->send("last");
    pair.a->finish();
    pair.a->finish();
    CHECK(!pair.a->is_flushed());
    pump_until({pair.b.get(), pair.a.get()}, [&] { return pair.b->has_frame() && pair.a->is_flushed(); });
    CHECK(!pair.b->has_ended());  // before its last frame
    CHECK_EQ(next_of(pair.b.get()), "last");
    pump_until({pair.b.get()}, [&] { return pair.b->has_ended(); });
    CHECK(!pair.a->has_ended());
    CHECK(!pair.a->is_over() && !pair.b->is_over());
    pair.b->send("still comes");
    pump_until({pair.a.get(), pair.b.get()}, [&] { return pair.a->has_frame(); });
    CHECK_EQ(next_of(pair.a.get()), "still comes");
    pair.b->finish();
    pump_until({pair.a.get(), pair.b.get()}, [&] { return pair.a->is_over() && pair.b->is_over(); });
    CHECK_EQ(pair.a->fd(), -1);
    CHECK_EQ(pair.b->fd(), -1);
    bool progressed = false;
    CHECK(pair.a->pump(&progressed).ok());
    CHECK(!progressed);
  });
}

TEST(a_lost_peer_is_an_error_after_its_last_frame) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    pair.b->send("last words");
    pump_until({pair.b.get()}, [&] { return pair.b->is_flushed(); });
    pair.b = nullptr;
    CHECK_EQ(next_of(pair.a.get()), "last words");
    const Status status = pump_until_lost(pair.a.get());
    check_lost(status, 1);
    CHECK(pair.a->is_over());
    CHECK(!pair.a->has_ended());
    pair.a->send("too late");
    bool progressed = false;
    CHECK_EQ(pair.a->pump(&progressed).message(), status.message());
    CHECK(!progressed);
  });
}

TEST(a_frame_of_which_a_part_is_missing_is_none) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    pair.b->send(std::string(kFrameLimit, 'x'));
    bool progressed = false;
    CHECK(pair.b->pump(&progressed).ok());
    CHECK(progressed && !pair.b->is_flushed());
    pair.b = nullptr;
    check_lost(pump_until_lost(pair.a.get()), 1);
    std::string frame;
    CHECK(!pair.a->receive(&frame));
  });
}

TEST(a_peer_that_is_lost_while_it_is_sent_to) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    pair.a->send(std::string(kFrameLimit, 'x'));
    bool progressed = false;
    CHECK(pair.a->pump(&progressed).ok());
    pair.b = nullptr;
    check_lost(pump_until_lost(pair.a.get()), 1);
    CHECK(!pair.a->is_flushed());
  });
}

TEST(a_rank_that_sleeps_on_a_connection_wakes_for_a_frame_and_a_loss) {
  on_each_transport([](const Wiring& wiring) {
    Pair pair(wiring);
    const auto sleep_until_news = [&] {
      const uint64_t start = now_ns();
      bool progressed = false;
      if (!pair.a->pump(&progressed).ok() || pair.a->has_frame()) return;
      sleep_on({{pair.a->fd(), POLLIN, 0}}, static_cast<int>(kSoon / kMillisecond));
      CHECK(now_ns() - start < kSoon / 2);
    };
    std::thread sender([&] {
      sleep_on({}, static_cast<int>(kBrief / kMillisecond));
      pair.b->send("frame");
      bool progressed = false;
      CHECK(pair.b->pump(&progressed).ok());
    });
    sleep_until_news();
    sender.join();
    CHECK_EQ(next_of(pair.a.get()), "frame");
    std::thread killer([&] {
      sleep_on({}, static_cast<int>(kBrief / kMillisecond));
      pair.b = nullptr;
    });
    sleep_until_news();
    killer.join();
    check_lost(pump_until_lost(pair.a.get()), 1);
  });
}

}  // namespace
}  // namespace hvl
