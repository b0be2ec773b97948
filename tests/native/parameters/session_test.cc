// Clients and a server of parameters, whose sessions are connected through shared memory and each transport.
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "p2p/shm_stream.h"
#include "parameters/client_session.h"
#include "parameters/server_session.h"
#include "transports.h"

namespace hvl {
namespace {

constexpr uint64_t kSoon = 10 * kSecond;
const ShardId kShard{7, 0};
const ShardId kOther{8, 0}, kMissing{9, 0};

const char* bytes_of(const std::vector<double>& values) { return reinterpret_cast<const char*>(values.data()); }

// The two ends of a connection.
struct Ends {
  std::shared_ptr<HostMemory> memory;
  std::unique_ptr<RemoteRanks> remote;
  std::unique_ptr<PeerStream> streams[2];
  std::optional<MessageKeys> keys[2];

  explicit Ends(int pid) : memory(HostMemory::anonymous(HostShape{2, 4096, 4})) {
    for (int end : {0, 1}) streams[end] = std::make_unique<ShmStream>(memory, end, 1 - end, pid);
  }
  explicit Ends(const Wiring& wiring) : remote(std::make_unique<RemoteRanks>(2, wiring)) {
    for (int end : {0, 1}) {
      streams[end] = std::make_unique<MeshStream>(remote->message_stream(end, 1 - end, &keys[end]), 1 - end);
    }
  }
  const MessageKeys* keys_of(int end) const { return keys[end].has_value() ? &*keys[end] : nullptr; }
};

// A client and the server's session for it.
struct Connection {
  Ends ends;
  std::deque<ClientCommand> commands;  // by number, from 1 on
  std::map<uint64_t, Status> ended;    // likewise
  ClientSession client;
  ServerSession server;

  template <typename How>
  Connection(const How& how, ShardStore* store)
      : ends(how),
        client("a server", std::move(ends.streams[0]), ends.keys_of(0),
               [this](ClientCommand* command, const Status& status) { ended[number_of(command)] = status; }),
        server("a client", std::move(ends.streams[1]), ends.keys_of(1), store) {}

  uint64_t number_of(const ClientCommand* command) const {
    for (size_t index = 0; index < commands.size(); ++index) {
      if (&commands[index] == command) return index + 1;
    }
    return 0;
  }
  ClientCommand* add(Command::Kind kind, ShardId shard, uint64_t offset, uint64_t count) {
    ClientCommand& command = commands.emplace_back();
    command.kind = kind;
    command.dtype = HVL_FLOAT64;
    command.shard = shard;
    command.range = Range{offset, count};
    return &command;
  }
  uint64_t call(ClientCommand* command) {
    client.call(command);
    return commands.size();
  }

  uint64_t push(const Update& update, uint64_t offset, const std::vector<double>& values, ShardId shard = kShard) {
    ClientCommand* command = add(Command::Kind::kPush, shard, offset, values.size());
    command->update = update;
    command->sent = bytes_of(values);
    command->num_sent = values.size() * sizeof(double);
    return call(command);
  }
  uint64_t pull(uint64_t offset, std::vector<double>* values, ShardId shard = kShard) {
    ClientCommand* command = add(Command::Kind::kPull, shard, offset, values->size());
    command->received = reinterpret_cast<char*>(values->data());
    command->num_received = values->size() * sizeof(double);
    return call(command);
  }
  void progress() {
    bool progressed = false;
    CHECK_EQ(client.progress(&progressed).message(), "");
    CHECK_EQ(server.progress(&progressed).message(), "");
  }
  void run_until(const std::function<bool()>& condition) {
    const uint64_t deadline = now_ns() + kSoon;
    while (!condition()) {
      REQUIRE(now_ns() < deadline);
      progress();
    }
  }
  bool is_done() const { return ended.size() == commands.size(); }
  void run() {
    run_until([&] { return is_done(); });
  }
};

// Calls function(connect) for each way to connect a client with a server.
void on_each_way(const std::function<void(const std::function<std::unique_ptr<Connection>(ShardStore*)>&)>& function) {
  for (int pid : {0, static_cast<int>(getpid())}) {
    function([&](ShardStore* store) { return std::make_unique<Connection>(pid, store); });
  }
  on_each_transport([&](const Wiring& wiring) {
    function([&](ShardStore* store) { return std::make_unique<Connection>(wiring, store); });
  });
}

// A store with a shard.
struct OneShard : ShardStore {
  explicit OneShard(uint64_t count) { CHECK(create(kShard, HVL_FLOAT64, count, 0, 0).ok()); }
};

std::vector<double> numbers(uint64_t count, int seed) {
  std::vector<double> made(count);
  for (size_t i = 0; i < count; ++i) made[i] = static_cast<double>((i * 7919 + static_cast<size_t>(seed)) % 1009);
  return made;
}

TEST(pushes_of_all_sizes_are_applied_in_order_and_pulls_see_those_before) {
  const std::vector<uint64_t> counts = {0, 1, kInlineBytes / 8, kInlineBytes / 8 + 1, 1500, kBlockElements};
  on_each_way([&](const auto& connect) {
    const uint64_t count = kBlockElements + 100;
    OneShard store(count);
    const auto connection = connect(&store);
    std::vector<double> expected(count);
    std::vector<std::vector<double>> pushed, pulled, wanted;
    pushed.reserve(2 * counts.size());
    pulled.reserve(counts.size());
    for (size_t index = 0; index < counts.size(); ++index) {
      const uint64_t offset = 50 + index;
      for (const Rule rule : {Rule::kAdd, Rule::kScaleAdd}) {
        pushed.push_back(numbers(counts[index], static_cast<int>(index)));
        connection->push(Update{rule, {2}}, offset, pushed.back());
        const double factor = rule == Rule::kAdd ? 1 : 2;
        for (size_t i = 0; i < counts[index]; ++i) expected[offset + i] += factor * pushed.back()[i];
      }
      pulled.emplace_back(counts[index]);
      connection->pull(offset, &pulled.back());
      wanted.emplace_back(expected.begin() + static_cast<int64_t>(offset),
                          expected.begin() + static_cast<int64_t>(offset + counts[index]));
    }
    connection->run();
    for (const auto& [number, status] : connection->ended) CHECK_EQ(status.message(), "");
    CHECK_EQ(connection->ended.size(), 3 * counts.size());
    CHECK(pulled == wanted);
  });
}

TEST(small_pushes_of_several_clients_add_up) {
  on_each_way([](const auto& connect) {
    constexpr int kPushes = 2000;
    OneShard store(128);
    std::vector<std::unique_ptr<Connection>> clients;
    for (int client = 0; client < 3; ++client) clients.push_back(connect(&store));
    const std::vector<double> ones(128, 1);
    for (int push = 0; push < kPushes; ++push) {
      for (const auto& client : clients) client->push(Update{Rule::kAdd, {}}, 0, ones);
    }
    for (const auto& client : clients) client->run();
    std::vector<double> sum(128);
    clients[0]->pull(0, &sum);
    clients[0]->run();
    CHECK(sum == std::vector<double>(128, 3 * kPushes));
  });
}

TEST(a_client_that_does_not_take_what_it_has_asked_for_holds_up_itself_only) {
  on_each_way([](const auto& connect) {
    OneShard store(kBlockElements);
    const auto silent = connect(&store), other = connect(&store);
    std::vector<std::vector<double>> pulled(20, std::vector<double>(kBlockElements));
    bool progressed = false;
    for (auto& values : pulled) silent->pull(0, &values);
    for (int round = 0; round < 100; ++round) {
      if (round < 3) CHECK(silent->client.progress(&progressed).ok());
      CHECK(silent->server.progress(&progressed).ok());
    }
    const std::vector<double> ones(kBlockElements, 1);
    other->push(Update{Rule::kAdd, {}}, 0, ones);
    other->run();
    silent->run();
    CHECK_EQ(silent->ended.size(), pulled.size());
    // By the server, before the push.
    const bool is_copied = silent->client.stream().can_copy() && !silent->server.stream().has_refused();
    CHECK(pulled.back() == (is_copied ? std::vector<double>(kBlockElements) : ones));
  });
}

TEST(a_command_that_fails_does_not_end_the_session) {
  on_each_way([](const auto& connect) {
    OneShard store(1000);
    CHECK(store.create(kOther, HVL_INT32, 1000, 0, 0).ok());
    const auto connection = connect(&store);
    const std::vector<double> one = {1}, many(1000, 1), too_many(1001, 1);
    std::vector<double> values(1000), beyond(1001);
    ClientCommand* cut = connection->add(Command::Kind::kPush, kShard, 0, 1000);
    cut->sent = bytes_of(many);
    cut->num_sent = 999 * sizeof(double);
    const std::vector<std::pair<uint64_t, std::string>> failed = {
        {connection->call(cut), "7992 bytes were pushed for 1000 elements of float64"},
        {connection->push(Update{Rule::kAdd, {}}, 0, one, kMissing), "a server: there is no such shard"},
        {connection->push(Update{Rule::kAdd, {}}, 0, many, kMissing), "a server: there is no such shard"},
        {connection->push(Update{Rule::kAdd, {}}, 0, too_many), "1001 elements from 0 on"},
        {connection->push(Update{Rule::kAdd, {}}, 1000, one), "1 elements from 1000 on"},
        {connection->push(Update{Rule::kSgd, {}}, 0, many, kOther),
         "has elements of float64, and the shard has elements of int32"},
        {connection->pull(0, &values, kMissing), "a server: there is no such shard"},
        {connection->pull(0, &beyond), "1001 elements from 0 on"},
    };
    const uint64_t fine = connection->push(Update{Rule::kAdd, {}}, 0, many);
    ClientCommand* zeros = connection->add(Command::Kind::kPush, kShard, 10, 5);
    zeros->update.rule = Rule::kZero;
    const uint64_t zero = connection->call(zeros);
    connection->pull(0, &values);
    connection->run();
    for (const auto& [number, text] : failed) CHECK_HAS(connection->ended.at(number).message(), text);
    CHECK(connection->ended.at(fine).ok());
    CHECK(connection->ended.at(zero).ok());
    std::vector<double> expected(many);
    std::fill(expected.begin() + 10, expected.begin() + 15, 0);
    CHECK(values == expected);
  });
}

TEST(a_client_ends_what_is_pending_when_the_server_is_lost) {
  OneShard store(10);
  Connection connection(0, &store);
  const std::vector<double> one = {1};
  const uint64_t first = connection.push(Update{Rule::kAdd, {}}, 0, one);
  connection.run();
  const uint64_t second = connection.push(Update{Rule::kAdd, {}}, 0, one);
  connection.client.fail(Status::lost("the server is lost"));
  CHECK(connection.ended.at(first).ok());
  CHECK_EQ(connection.ended.at(second).message(), "the server is lost");
  CHECK(connection.is_done());
}

TEST(many_long_commands_are_carried_out_in_turns_with_other_sessions) {
  on_each_way([](const auto& connect) {
    constexpr uint64_t kCount = kMostPayloadBytes / sizeof(double);
    OneShard store(kCount);
    const auto connection = connect(&store);
    for (int zero = 0; zero < 90; ++zero) {
      ClientCommand* command = connection->add(Command::Kind::kPush, kShard, 0, kCount);
      command->update.rule = Rule::kZero;
      connection->call(command);
    }
    int turns = 0;
    connection->run_until([&] {
      turns += connection->server.has_more() ? 1 : 0;
      return connection->is_done();
    });
    CHECK(turns >= 20);
  });
}

// A server that answers as it is told to.
struct FalseServer final : Session {
  std::vector<double> elements = std::vector<double>(kMostPayloadBytes / sizeof(double));
  bool sends_error = false, sends_twice = false;

  FalseServer(std::unique_ptr<PeerStream> stream, const MessageKeys* keys)
      : Session("a client", std::move(stream), keys) {}

  Status on_batch(Bytes batch) override {
    BatchReader reader(batch);
    Command command;
    const char* payload = nullptr;
    const Status status = reader.read(&command, &payload);
    for (int message = 0; message < (sends_twice ? 2 : 1); ++message) {
      send_elements(command.number, reinterpret_cast<const char*>(elements.data()), kMostPayloadBytes);
    }
    if (sends_error) put(Reply{command.number, Status(HVL_MISMATCH, "an error")});
    return status;
  }
  Status on_elements(uint64_t, uint64_t) override { return Status(); }
  Status on_fetched(uint64_t) override { return Status(); }
  Status on_sent(uint64_t) override { return Status(); }
  Status before_sending() override { return Status(); }
};

TEST(an_error_behind_elements_or_elements_that_come_twice_end_the_clients_session) {
  for (const bool sends_error : {false, true}) {
    Ends ends(0);
    int num_ended = 0;
    ClientSession client("a server", std::move(ends.streams[0]), nullptr,
                         [&](ClientCommand*, const Status&) { ++num_ended; });
    FalseServer server(std::move(ends.streams[1]), nullptr);
    server.sends_error = sends_error;
    server.sends_twice = !sends_error;
    std::vector<double> received(server.elements.size());
    ClientCommand pull;
    pull.kind = Command::Kind::kPull;
    pull.range.count = received.size();
    pull.received = reinterpret_cast<char*>(received.data());
    pull.num_received = kMostPayloadBytes;
    client.call(&pull);
    const uint64_t deadline = now_ns() + kSoon;
    Status status;
    bool progressed = false;
    while (status.ok() && now_ns() < deadline) {
      CHECK(server.progress(&progressed).ok());
      status = client.progress(&progressed);
    }
    CHECK_HAS(status.message(), sends_error ? "an error behind the elements" : "elements");
    CHECK_EQ(num_ended, 0);  // so its memory is not the user's again
    client.close();
  }
}

// A client that sends elements without commands.
struct FalseClient final : Session {
  FalseClient(std::unique_ptr<PeerStream> stream, const MessageKeys* keys)
      : Session("a server", std::move(stream), keys) {}
  Status on_batch(Bytes) override { return Status(); }
  Status on_elements(uint64_t, uint64_t) override { return Status(); }
  Status on_fetched(uint64_t) override { return Status(); }
  Status on_sent(uint64_t) override { return Status(); }
  Status before_sending() override { return Status(); }
  using Session::send_elements;
};

TEST(elements_that_come_twice_end_the_servers_session) {
  Ends ends(0);
  ShardStore store;
  FalseClient client(std::move(ends.streams[0]), nullptr);
  ServerSession server("a client", std::move(ends.streams[1]), nullptr, &store);
  const std::vector<char> elements(100);
  Status status;
  bool progressed = false;
  for (int message = 0; message < 2; ++message) {  // the first one has been fetched when the second one comes
    client.send_elements(1, elements.data(), elements.size());
    for (int round = 0; round < 10 && status.ok(); ++round) {
      CHECK(client.progress(&progressed).ok());
      status = server.progress(&progressed);
    }
  }
  CHECK_HAS(status.message(), "twice, or in another order");
}

TEST(a_client_that_leaves_has_no_clock_any_more) {
  ShardStore store;
  Connection stays(0, &store), leaves(0, &store);
  for (Connection* each : {&stays, &leaves}) {
    ClientCommand* create = each->add(Command::Kind::kCreate, kShard, 2, 10);
    create->client = each == &stays ? 1 : 2;
    each->call(create);
    each->run();
  }
  ClientCommand* ticks = stays.add(Command::Kind::kTick, kShard, 0, 0);
  ticks->client = 1;
  const uint64_t tick = stays.call(ticks);
  for (int round = 0; round < 10; ++round) stays.progress();
  CHECK_EQ(stays.ended.count(tick), size_t{0});
  leaves.client.leave();
  leaves.run_until([&] { return leaves.server.has_left(); });
  stays.run();
  CHECK(stays.ended.at(tick).ok());
}

TEST(batches_that_are_cut_off_or_out_of_range) {
  Command command;
  command.number = 1;
  command.num_inline = 16;
  Bytes whole;
  append(command, "0123456789abcdef", &whole);
  Command read;
  const char* elements = nullptr;
  BatchReader reader(whole);
  CHECK(reader.read(&read, &elements).ok());
  CHECK_EQ(std::string(elements, 16), "0123456789abcdef");
  CHECK(reader.is_at_end());
  for (size_t length = 1; length < whole.size(); ++length) {
    const Bytes part(whole.begin(), whole.begin() + static_cast<int64_t>(length));
    CHECK_HAS(BatchReader(part).read(&read, &elements).message(), "cut off");
  }
  for (int position : {0, 1, 2, 3, 4, 5, 6, 19, 23, 39}) {
    Bytes changed = whole;
    changed[static_cast<size_t>(position)] = '\xff';
    CHECK_HAS(BatchReader(changed).read(&read, &elements).message(), "out of range");
  }
  Bytes reply;
  append(Reply{3, Status(HVL_MISMATCH, "why")}, &reply);
  Reply got;
  CHECK(BatchReader(reply).read(&got).ok());
  CHECK_EQ(got.number, uint64_t{3});
  CHECK_EQ(got.status.message(), "why");
  for (size_t length = 1; length < reply.size(); ++length) {
    const Bytes part(reply.begin(), reply.begin() + static_cast<int64_t>(length));
    CHECK_HAS(BatchReader(part).read(&got).message(), "cut off");
  }
}

}  // namespace
}  // namespace hvl
