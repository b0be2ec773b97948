// The node of a process: many calls, clocks, and what happens when a peer is lost, stalls or sends garbage.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parameter_processes.h"

namespace hvl {
namespace {

constexpr uint64_t kMomentLater = kSecond;  // in which the loss of a peer is seen

TEST(small_pushes_add_up_over_many_handles) {
  for (const Way way : kWays) {
    Process server, client;
    Array array(&client, {{client.connect(way, &server), 256}});
    CHECK(array.create().ok());
    const std::vector<float> ones(256, 1);
    std::vector<int64_t> handles;
    for (int push = 0; push < 3000; ++push) handles.push_back(array.send(kAdd, 0, ones));
    for (int64_t handle : handles) CHECK_EQ(client.wait(handle).message(), "");
    CHECK(array.all(256) == std::vector<float>(256, 3000));
  }
}

TEST(a_process_is_its_own_server) {
  Process both;
  for (const Way way : kWays) {
    Array array(&both, {{both.connect(way, &both), 1 << 20}});
    CHECK(array.create().ok());
    const std::vector<float> values = counted(1 << 20);
    CHECK_EQ(both.wait(array.send(kCopy, 0, values)).message(), "");
    CHECK(array.all(values.size()) == values);
  }
}

TEST(a_client_that_is_too_far_ahead_waits_and_a_lost_one_does_not_count) {
  for (const Way way : kWays) {
    Process server, fast;
    auto slow = std::make_unique<Process>();
    Array of_fast(&fast, {{fast.connect(way, &server), 10}}, 2);
    Array of_slow(slow.get(), {{slow->connect(way, &server), 10}}, 2);
    CHECK(of_fast.create().ok());
    CHECK(fast.wait(of_fast.tick(1)).ok());
    const int64_t second = of_fast.tick(1);
    CHECK(fast.wait(of_fast.send(kAdd, 0, {1})).ok());  // what follows a tick does not wait for it
    CHECK(!fast.is_done(second));
    CHECK(of_slow.create().ok());
    CHECK(fast.wait(of_fast.send(kAdd, 0, {1})).ok());
    CHECK(!fast.is_done(second));
    CHECK(slow->wait(of_slow.tick(0)).ok());
    CHECK_EQ(fast.wait(second).message(), "");
    const int64_t third = of_fast.tick(1);
    CHECK(fast.wait(of_fast.send(kAdd, 0, {1})).ok());
    CHECK(!fast.is_done(third));
    slow = nullptr;
    CHECK_EQ(fast.wait(third, kMomentLater).message(), "");
    CHECK(fast.wait(of_fast.tick(0)).ok());
  }
}

TEST(a_client_that_has_no_clock_any_more_does_not_count) {
  for (const Way way : kWays) {
    Process server, fast, slow;
    Array of_fast(&fast, {{fast.connect(way, &server), 10}}, 2);
    Array of_slow(&slow, {{slow.connect(way, &server), 10}}, 2);
    CHECK(of_fast.create().ok());
    CHECK(of_slow.create().ok());
    const int64_t first = of_fast.tick(0);
    CHECK(fast.wait(of_fast.send(kAdd, 0, {1})).ok());
    CHECK(!fast.is_done(first));
    CHECK_EQ(slow.wait(of_slow.tick(-1)).message(), "");
    CHECK_EQ(fast.wait(first, kMomentLater).message(), "");
    CHECK(fast.wait(of_fast.tick(0)).ok());
    CHECK(slow.wait(of_slow.send(kAdd, 0, {1})).ok());
    CHECK(!slow.wait(of_slow.tick(0)).ok());
  }
}

TEST(a_lost_server_ends_its_calls_at_once_with_its_name) {
  for (const Way way : kWays) {
    auto server = std::make_unique<Process>();
    Process other, client;
    const int64_t number = client.connect(way, server.get(), "a client", "server 0 on host b");
    Array array(&client, {{number, 2 << 20}, {client.connect(way, &other), 10}}), alone(&client, {{2, 10}});
    CHECK(array.create().ok());
    const std::vector<float> values((2 << 20) + 10, 1);  // 8 MiB
    std::vector<int64_t> handles;
    for (int push = 0; push < 20; ++push) handles.push_back(array.send(kAdd, 0, values));
    CHECK(client.wait(handles[0]).ok());
    const uint64_t begin = now_ns();
    server = nullptr;
    const Status last = client.wait(handles.back(), kMomentLater);
    CHECK(now_ns() - begin < kMomentLater);
    CHECK_HAS(last.message(), "server 0 on host b");
    CHECK_EQ(last.code(), HVL_JOB_BROKEN);
    CHECK_HAS(client.wait(array.send(kAdd, 0, values)).message(), "server 0 on host b");
    CHECK_HAS(client.wait(alone.send(kAdd, 0, {1})).message(), "there is no such shard");  // index 0 of `other`
  }
}

// A peer whose host has stopped to answer.
struct SilentStream final : PeerStream {
  int ends[2];

  SilentStream() { make_pair_of_ends(ends); }
  ~SilentStream() override {
    for (int end : ends) ::close(end);
  }
  uint64_t send(const void*, uint64_t) override { return 1; }
  uint64_t receive(void*, uint64_t) override { return 1; }
  bool has_sent(uint64_t) const override { return false; }
  bool has_received(uint64_t) const override { return false; }
  Status progress(bool*) override { return Status(); }
  bool can_progress() const override { return false; }
  void add_to(std::vector<pollfd>* polled) const override { polled->push_back(pollfd{ends[0], POLLIN, 0}); }
  Status check_answered() const override { return Status::lost("server 1 on host c does not answer"); }
};

TEST(a_busy_node_sees_that_a_host_does_not_answer) {
  Process server, client;
  Array busy(&client, {{client.connect(Way::kRing, &server), 1 << 20}});
  CHECK(busy.create().ok());
  PeerConnection silent;
  silent.peer = "server 1 on host c";
  silent.stream = std::make_unique<SilentStream>();
  Array waiting(&client, {{client.node.add_server(std::move(silent)), 10}});
  const std::vector<float> one(1, 1), ones(1 << 20, 1);
  const int64_t handle = waiting.send(kAdd, 0, one);
  std::deque<int64_t> under_way;
  const uint64_t deadline = now_ns() + kPatience;
  while (!client.is_done(handle) && now_ns() < deadline) {
    under_way.push_back(busy.send(kAdd, 0, ones));
    if (under_way.size() < 4) continue;
    CHECK(client.wait(under_way.front()).ok());
    under_way.pop_front();
  }
  CHECK_HAS(client.wait(handle, 0).message(), "does not answer");
  for (int64_t each : under_way) CHECK(client.wait(each).ok());
}

TEST(a_client_that_is_lost_amid_a_push_or_sends_garbage_is_dropped) {
  for (const Way way : kWays) {
    Process server, client;
    Array array(&client, {{client.connect(way, &server), 2 << 20}});
    CHECK(array.create().ok());
    const std::vector<float> ones(2 << 20, 1);
    {
      Process lost;
      Array of_lost(&lost, {{lost.connect(way, &server, "a client that is lost"), 2 << 20}});
      for (int push = 0; push < 4; ++push) of_lost.send(kAdd, 0, ones);
    }
    CHECK_EQ(client.wait(array.send(kAdd, 0, ones)).message(), "");
    if (way != Way::kTcp && way != Way::kTcpWithMacs) continue;
    int ends[2];
    make_pair_of_ends(ends);
    server.node.add_client(tcp_end(ends[1], "garbage", way == Way::kTcpWithMacs, 1));
    close(ends[1]);
    const std::string garbage(4096, '\x5a');
    CHECK(write(ends[0], garbage.data(), garbage.size()) == 4096);
    char byte;
    fcntl(ends[0], F_SETFL, 0);
    CHECK(recv(ends[0], &byte, 1, 0) <= 0);  // the server closes it
    close(ends[0]);
    CHECK_EQ(client.wait(array.send(kAdd, 0, ones)).message(), "");
  }
}

TEST(a_client_that_stalls_holds_up_no_other) {
  Process server, client;
  BothEnds ends(Way::kTcp, "a client that stalls", "a server");  // its end is never read
  server.node.add_client(std::move(ends.server));
  std::unique_ptr<ClientArray> wanted;
  Array array(&client, {{client.connect(Way::kTcp, &server), 4 << 20}});
  CHECK(array.create().ok());
  {
    auto stalled = std::make_unique<ClientSession>("a server", std::move(ends.client.stream), nullptr,
                                                   [](ClientCommand*, const Status&) {});
    std::vector<float> values(256 << 10);
    std::vector<ClientCommand> pulls(100);
    for (ClientCommand& pull : pulls) {
      pull.kind = Command::Kind::kPull;
      pull.dtype = HVL_FLOAT32;
      pull.shard = ShardId{7, 0};
      pull.range.count = values.size();
      pull.received = reinterpret_cast<char*>(values.data());
      pull.num_received = values.size() * sizeof(float);
      stalled->call(&pull);
    }
    bool progressed = false;
    for (int round = 0; round < 3; ++round) CHECK(stalled->progress(&progressed).ok());
    const std::vector<float> ones(4 << 20, 1);
    for (int push = 0; push < 3; ++push) CHECK_EQ(client.wait(array.send(kAdd, 0, ones)).message(), "");
    CHECK(array.all(ones.size()) == std::vector<float>(ones.size(), 3));
  }
}

TEST(a_node_serves_a_thousand_clients) {
  const int num_clients = check::is_brief ? 100 : 1000;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  Process server, client;
  std::vector<Array> arrays;
  for (int index = 0; index < num_clients; ++index) {
    arrays.emplace_back(&client, std::vector<hvl_parameters_shard>{{client.connect(Way::kTcp, &server), 1000}});
  }
  CHECK(arrays[0].create().ok());
  const std::vector<float> ones(1000, 1);
  std::vector<int64_t> handles;
  for (int round = 0; round < 5; ++round) {
    for (Array& array : arrays) handles.push_back(array.send(kAdd, 0, ones));
  }
  for (int64_t handle : handles) CHECK_EQ(client.wait(handle).message(), "");
  CHECK(arrays.back().all(1000) == std::vector<float>(1000, 5 * static_cast<float>(num_clients)));
}

TEST(connections_are_refused_while_the_node_stops) {
  for (int round = 0; round < 20; ++round) {
    int ends[2];
    make_pair_of_ends(ends);
    hvl_parameters_connection client{}, server{};
    client.fd = ends[0], server.fd = ends[1];
    client.peer = server.peer = "the other end";
    client.memory_fd = server.memory_fd = -1;
    REQUIRE(hvl_parameters_add_client(&server) == HVL_OK);
    const int64_t number = hvl_parameters_add_server(&client);
    REQUIRE(number > 0);
    const hvl_parameters_shard shard{number, 10};
    const hvl_parameters_array_config config{1, HVL_FLOAT32, &shard, 1, 0};
    hvl_parameters_array* array = hvl_parameters_open(&config);
    const int64_t handle = hvl_parameters_create(array);
    std::thread stops([] { hvl_parameters_stop(); });
    std::thread waits([&] { hvl_parameters_wait(handle, 10); });
    int pair[2];
    make_pair_of_ends(pair);
    server.fd = pair[1];
    const int32_t status = hvl_parameters_add_client(&server);  // to this node, to none, or to the next one
    CHECK(status == HVL_OK || status == HVL_SHUT_DOWN);
    stops.join();
    waits.join();
    CHECK_EQ(hvl_parameters_stop(), HVL_OK);
    hvl_parameters_close(array);
    for (int end : {ends[0], ends[1], pair[0], pair[1]}) close(end);
  }
}

TEST(threads_call_and_stop_ends_all_handles) {
  for (const Way way : kWays) {
    Process server;
    auto client = std::make_unique<Process>();
    Array array(client.get(), {{client->connect(way, &server), 1 << 20}}, 2);
    CHECK(array.create().ok());
    std::vector<std::thread> threads;
    for (int index = 0; index < 4; ++index) {
      threads.emplace_back([&] {
        const std::vector<float> ones(1000, 1);
        for (int push = 0; push < 100; ++push) CHECK(client->wait(array.send(kAdd, 0, ones)).ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(array.all(1000)[999], 400);
    const std::vector<float> ones(1 << 20, 1);
    const int64_t handles[] = {array.tick(0), array.send(kAdd, 0, ones)};
    client->node.stop();
    CHECK_HAS(client->wait(handles[0], 0).message(), "has stopped");
    client->wait(handles[1], 0);
    int64_t handle = 0;
    CHECK_EQ(client->node.start(std::make_unique<ClientRequest>(), &handle).code(), HVL_SHUT_DOWN);
  }
}

}  // namespace
}  // namespace hvl
