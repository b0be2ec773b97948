// Shards at two servers: what clients have seen acknowledged survives the loss of one of them, and is not applied
// twice.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parameter_processes.h"
#include "wrapped_stream.h"

namespace hvl {
namespace {

constexpr uint64_t kRingId = 77;
constexpr double kShortPatience = 1;
constexpr int64_t kCount = HVL_PARAMETERS_BLOCK + 100;

int64_t start_occasion(Process* process, Occasion occasion, int64_t server) {
  return process->start([&](ClientRequest* request) {
    request->occasion = occasion;
    request->server = server;
    request->ring = kRingId;
    return Status();
  });
}

struct Servers {
  std::vector<std::unique_ptr<Process>> all;
  Way way;

  Servers(Way by, int count) : way(by) {
    for (int index = 0; index < count; ++index) all.push_back(std::make_unique<Process>());
  }
  Process* operator[](size_t index) { return all[index].get(); }
  std::string name(size_t index) const { return "server " + std::to_string(index); }
  // Server `from` has copies at server `to` until the handle is complete.
  int64_t replicate(size_t from, size_t to) {
    const int64_t number = all[from]->connect(way, all[to].get(), name(from), name(to));
    return start_occasion(all[from].get(), Occasion::kCopiesEnd, number);
  }
  void kill(size_t index) { all[index] = nullptr; }
  void restart(size_t index) { all[index] = std::make_unique<Process>(); }
};

// A client of an array with a shard at server 0, whose copy is at the next one.
struct Client {
  Process process;
  Servers* servers;
  std::vector<int64_t> numbers;
  std::unique_ptr<Array> array;

  explicit Client(Servers* of, int32_t num_clients = 0, double patience = 60, const std::string& name = "a client")
      : servers(of) {
    for (size_t index = 0; index < servers->all.size(); ++index) {
      numbers.push_back(process.connect(servers->way, (*servers)[index], name, servers->name(index)));
    }
    const hvl_parameters_ring ring{kRingId, numbers.data(), static_cast<int32_t>(numbers.size()), patience};
    array = std::make_unique<Array>(&process, std::vector<hvl_parameters_shard>{{numbers[0], kCount}}, num_clients,
                                    HVL_FLOAT32, &ring);
  }
  void create() { CHECK_EQ(array->create().message(), ""); }
  void await_copies() {
    CHECK_EQ(process.wait(process.start([&](ClientRequest* request) { return array->array->await_copies(request); }))
                 .message(),
             "");
  }
  int64_t add(float value) {
    added.push_back(std::make_unique<std::vector<float>>(kCount, value));
    return array->send(kAdd, 0, *added.back());
  }
  void add_and_wait(float value) { CHECK_EQ(process.wait(add(value)).message(), ""); }
  float value() {
    const std::vector<float> all = array->all(kCount);
    CHECK(all == std::vector<float>(kCount, all[0]));
    return all[0];
  }
  void reconnect(size_t index) {
    BothEnds ends(servers->way, "a client", servers->name(index));
    (*servers)[index]->node.add_client(std::move(ends.server));
    process.node.reconnect(numbers[index], std::move(ends.client));
  }
  std::vector<std::unique_ptr<std::vector<float>>> added;
};

// Sends messages, but not the elements that the other end has asked for.
struct WithholdingStream final : WrappedStream {
  static constexpr uint64_t kNever = UINT64_MAX;
  using WrappedStream::WrappedStream;

  uint64_t send(const void* data, uint64_t num_bytes) override {
    withholds = withholds || num_bytes > kEagerBytes;
    return withholds ? kNever : WrappedStream::send(data, num_bytes);
  }
  bool has_sent(uint64_t end) const override { return end != kNever && WrappedStream::has_sent(end); }

  bool withholds = false;
};

// A server that begins to answer pulls.
struct BeginningServer final : Session {
  const std::vector<char> elements = std::vector<char>(kPieceBytesMost);

  explicit BeginningServer(std::unique_ptr<PeerStream> stream) : Session("a client", std::move(stream), nullptr) {}

  Status on_batch(Bytes batch) override {
    BatchReader reader(batch);
    Command command;
    const char* payload = nullptr;
    const Status status = reader.read(&command, &payload);
    send_elements(command.number, elements.data(), command.range.count * sizeof(float));
    return status;
  }
  Status on_elements(uint64_t, uint64_t) override { return Status(); }
  Status on_fetched(uint64_t) override { return Status(); }
  Status on_sent(uint64_t) override { return Status(); }
  Status before_sending() override { return Status(); }
};

// A rule that holds up the thread of a server, as if its process had been stopped.
std::atomic<bool> is_held{false}, may_go_on{false};
int32_t hold_up(void*, const char*, const double*, int32_t, int32_t, void*, const void*, int64_t, char*) {
  is_held = true;
  while (!may_go_on) std::this_thread::yield();
  return 0;
}

Update hold() {
  Update rule{Rule::kNamed, {}};
  rule.name = "hold";
  is_held = may_go_on = false;
  return rule;
}

TEST(the_copy_goes_on_with_all_that_was_acknowledged) {
  for (const Way way : kWays) {
    Servers servers(way, 2);
    Client client(&servers), other(&servers);
    client.create();
    client.add_and_wait(1);  // before there is a copy
    servers.replicate(0, 1);
    client.await_copies();
    for (int push = 0; push < 5; ++push) client.add_and_wait(1);
    other.add_and_wait(10);
    std::vector<int64_t> handles;
    for (int push = 0; push < 20; ++push) handles.push_back(client.add(1));
    servers.kill(0);
    for (int64_t handle : handles) CHECK_EQ(client.process.wait(handle).message(), "");
    CHECK_EQ(client.value(), 36.0F);
    CHECK_EQ(other.value(), 36.0F);
    other.add_and_wait(1);
    CHECK_EQ(client.value(), 37.0F);
  }
}

TEST(the_copy_answers_a_receive_whose_server_is_lost_amid_its_elements) {
  Process process, server;
  BothEnds ends(Way::kTcp, "a client", "server 0");
  auto stream = std::make_unique<WithholdingStream>(std::move(ends.server.stream));
  const bool& withholds = stream->withholds;
  auto lost = std::make_unique<BeginningServer>(std::move(stream));
  const int64_t numbers[] = {process.node.add_server(std::move(ends.client)), process.connect(Way::kTcp, &server)};
  const hvl_parameters_ring ring{kRingId, numbers, 2, 60};
  const std::vector<float> sent = counted(HVL_PARAMETERS_BLOCK);
  Array before(&process, {{numbers[0], HVL_PARAMETERS_BLOCK}}, 0, HVL_FLOAT32, &ring);
  Array after(&process, {{numbers[1], HVL_PARAMETERS_BLOCK}}, 0, HVL_FLOAT32, &ring);
  CHECK_EQ(after.create().message(), "");
  CHECK_EQ(process.wait(after.send(kCopy, 0, sent)).message(), "");
  std::vector<float> received(sent.size());
  const int64_t handle = before.receive(0, &received);
  bool progressed = false;
  for (const uint64_t deadline = now_ns() + kPatience; !withholds;) {
    REQUIRE(now_ns() < deadline && lost->progress(&progressed).ok());
  }
  lost = nullptr;
  CHECK_EQ(process.wait(handle).message(), "");
  CHECK(received == sent);
}

TEST(the_copy_has_what_a_process_has_changed_at_its_own_server) {
  for (const Way way : kWays) {
    Servers servers(way, 2);
    Client other(&servers);
    Process* both = servers[0];
    const int64_t numbers[] = {both->connect_to_itself("server 0"), both->connect(way, servers[1])};
    const hvl_parameters_ring ring{kRingId, numbers, 2, 60};
    Array own(both, {{numbers[0], kCount}}, 0, HVL_FLOAT32, &ring);
    CHECK_EQ(own.create().message(), "");
    servers.replicate(0, 1);
    other.await_copies();
    const std::vector<float> ones(kCount, 1);
    std::vector<int64_t> handles;
    for (int push = 0; push < 300; ++push) handles.push_back(own.send(kAdd, 0, ones));  // more than may be under way
    other.add_and_wait(1);
    for (int64_t handle : handles) CHECK_EQ(both->wait(handle).message(), "");
    CHECK(own.all(kCount) == std::vector<float>(kCount, 301));
    servers.kill(0);
    CHECK_EQ(other.value(), 301.0F);
  }
}

TEST(changes_are_made_in_order_and_once_when_the_primary_is_lost) {
  for (int round = 0; round < (check::is_brief ? 4 : 30); ++round) {
    Servers servers(kWays[static_cast<size_t>(round) % kWays.size()], 2);
    Client client(&servers);
    client.create();
    servers.replicate(0, 1);
    client.await_copies();
    std::vector<int64_t> handles;
    const Update twice{Rule::kScaleAdd, {2}};
    const std::vector<float> one(1, 1);
    float expected = 0;
    for (int push = 0; push < 200; ++push) {
      handles.push_back(client.array->send(push % 10 == 9 ? kCopy : twice, 0, one));
      expected = push % 10 == 9 ? 1 : expected + 2;
      if (push != 100) continue;
      while (!client.process.is_done(handles[static_cast<size_t>(round)])) std::this_thread::yield();
      servers.kill(0);
    }
    for (int64_t handle : handles) CHECK_EQ(client.process.wait(handle).message(), "");
    CHECK_EQ(client.array->all(1)[0], expected);
  }
}

TEST(a_server_whose_replica_is_lost_goes_on_and_makes_another_copy) {
  for (const Way way : kWays) {
    Servers servers(way, 3);
    Client client(&servers);
    client.create();
    const int64_t copies = servers.replicate(0, 1);
    client.await_copies();
    client.add_and_wait(1);
    std::vector<int64_t> handles;
    for (int push = 0; push < 20; ++push) handles.push_back(client.add(1));
    servers.kill(1);
    for (int64_t handle : handles) CHECK_EQ(client.process.wait(handle).message(), "");
    CHECK_HAS(servers[0]->wait(copies).message(), "server 1");
    CHECK_EQ(client.value(), 21.0F);
    servers.replicate(0, 2);
    std::vector<int64_t> during;
    for (int push = 0; push < 20; ++push) during.push_back(client.add(1));
    client.await_copies();
    for (int64_t handle : during) CHECK_EQ(client.process.wait(handle).message(), "");
    servers.kill(0);
    CHECK_EQ(client.value(), 41.0F);
    client.add_and_wait(1);
    CHECK_EQ(client.value(), 42.0F);
  }
}

TEST(a_server_that_comes_back_gets_a_copy_and_the_clients_find_it) {
  Servers servers(Way::kTcp, 2);
  Client client(&servers);
  client.create();
  servers.replicate(0, 1);
  client.await_copies();
  const Update adam{Rule::kAdam, {0.1, 0.9, 0.99, 1e-8}};
  const std::vector<float> gradient = counted(kCount, 1);
  Process reference_server, reference_client;
  Array reference(&reference_client, {{reference_client.connect(Way::kTcp, &reference_server), kCount}});
  CHECK(reference.create().ok());
  for (int loss = 0; loss < 4; ++loss) {
    const size_t lost = loss % 2, other = 1 - lost;
    for (Array* each : {client.array.get(), &reference}) {
      CHECK_EQ(each->process->wait(each->send(adam, 0, gradient)).message(), "");
    }
    const int64_t ended = start_occasion(&client.process, Occasion::kServerEnds, client.numbers[lost]);
    servers.kill(lost);
    CHECK(!client.process.wait(ended).ok());
    servers.restart(lost);
    client.reconnect(lost);
    CHECK(client.array->all(kCount) == reference.all(kCount));
    servers.replicate(other, lost);
    client.await_copies();
  }
}

TEST(a_primary_that_was_held_up_is_deposed) {
  for (const Way way : {Way::kRing, Way::kTcp}) {
    Servers servers(way, 2);
    Client client(&servers, 0, kShortPatience), other(&servers);
    servers[0]->node.set_user_rules({hold_up, nullptr});
    client.create();
    servers.replicate(0, 1);
    client.await_copies();
    client.add_and_wait(1);
    const Update rule = hold();
    const std::vector<float> one(1, 1);
    const int64_t held = other.array->send(rule, 0, one);
    while (!is_held) std::this_thread::yield();
    const int64_t waits = other.add(10);
    client.add_and_wait(2);  // the patience of this client ends
    CHECK_EQ(client.value(), 3.0F);
    may_go_on = true;  // now the old primary is told
    CHECK_EQ(other.process.wait(waits).message(), "");
    CHECK_HAS(other.process.wait(held).message(), "no rule 'hold'");  // server 1 has not got it
    CHECK_EQ(client.value(), 13.0F);
    CHECK_EQ(other.value(), 13.0F);
  }
}

TEST(a_replica_that_was_held_up_is_left_and_removes_its_copy) {
  Servers servers(Way::kTcp, 2);
  Client client(&servers, 0, kShortPatience);
  Process second, elsewhere;
  Array own(&second, {{second.connect(Way::kTcp, &elsewhere), 1}, {second.connect(Way::kTcp, servers[1]), 10}});
  servers[1]->node.set_user_rules({hold_up, nullptr});
  CHECK(own.create().ok());
  client.create();
  const int64_t copies = servers.replicate(0, 1);
  client.await_copies();
  const Update rule = hold();
  const std::vector<float> one(1, 1);
  const int64_t held = own.send(rule, 1, one);
  while (!is_held) std::this_thread::yield();
  client.add_and_wait(1);
  CHECK_HAS(servers[0]->wait(copies).message(), "server 1 has not answered for");
  client.add_and_wait(1);
  may_go_on = true;
  CHECK(second.wait(held).ok());
  servers.kill(0);  // with the only copy that is up to date
  CHECK_HAS(client.process.wait(client.add(1)).message(), "is lost with both of its servers");
}

TEST(both_servers_lost_is_an_error_that_says_so) {
  for (const Way way : {Way::kCopies, Way::kTcp}) {
    Servers servers(way, 2);
    Client client(&servers);
    client.create();
    servers.replicate(0, 1);
    client.await_copies();
    servers.kill(0);
    servers.kill(1);
    const uint64_t begin = now_ns();
    CHECK_HAS(client.process.wait(client.add(1)).message(), "shard 0 is lost with both of its servers");
    CHECK(now_ns() - begin < 2 * kSecond);
    servers.restart(0);
    client.reconnect(0);
    CHECK_HAS(client.process.wait(client.add(1)).message(), "shard 0 is lost with both of its servers");
  }
}

TEST(ticks_go_on_at_the_copy) {
  Servers servers(Way::kTcp, 2);
  Client fast(&servers, 2);
  auto slow = std::make_unique<Client>(&servers, 2);
  fast.create();
  servers.replicate(0, 1);
  slow->create();
  fast.await_copies();
  const auto tick = [](Client* client, int64_t staleness) { return client->array->tick(staleness); };
  CHECK(fast.process.wait(tick(&fast, 1)).ok());
  const int64_t second = tick(&fast, 1);
  fast.add_and_wait(1);
  CHECK(!fast.process.is_done(second));
  servers.kill(0);
  fast.add_and_wait(1);
  CHECK(!fast.process.is_done(second));
  CHECK(slow->process.wait(tick(slow.get(), 0)).ok());
  CHECK_EQ(fast.process.wait(second).message(), "");
  const int64_t third = tick(&fast, 1);
  fast.add_and_wait(1);
  CHECK(!fast.process.is_done(third));
  slow = nullptr;
  CHECK_EQ(fast.process.wait(third).message(), "");
}

TEST(the_copies_end_with_the_array) {
  Servers servers(Way::kTcp, 2);
  Client client(&servers);
  client.create();
  const int64_t copies = servers.replicate(0, 1);
  client.await_copies();
  const auto remove = [&](ClientRequest* request) { return client.array->array->remove(request); };
  CHECK_EQ(client.process.wait(client.process.start(remove)).message(), "");
  CHECK_EQ(servers[0]->wait(copies).message(), "");
  CHECK_HAS(client.process.wait(client.add(1)).message(), "is lost");
}

TEST(rings_that_cannot_be_used) {
  std::unique_ptr<ClientArray> array;
  const hvl_parameters_shard shard{1, 10};
  const int64_t servers[] = {1, 2}, others[] = {2, 3};
  const auto make = [&](const hvl_parameters_ring& ring) {
    return ClientArray::make({1, HVL_FLOAT32, &shard, 1, 0, &ring}, &array).message();
  };
  CHECK_HAS(make({0, servers, 2, 5}), "no id");
  CHECK_HAS(make({1, servers, 1, 5}), "needs another server");
  CHECK_HAS(make({1, others, 2, 5}), "not in the ring");
  CHECK_HAS(make({1, servers, 2, 0.5}), "after 1 s to 3600 s");
  CHECK_HAS(make({1, servers, 2, 0.0 / 0.0}), "after 1 s to 3600 s");
  CHECK_EQ(make({1, servers, 2, 5}), "");
}

}  // namespace
}  // namespace hvl
