// A process that is a client of its own server, and elements that a server copies directly to memory of a client.
#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "parameter_processes.h"

namespace hvl {
namespace {

constexpr int64_t kBlock = HVL_PARAMETERS_BLOCK, kNumElements = 16 * kBlock;

// Each block has been updated as a whole, since it was read at once.
bool has_whole_blocks(const std::vector<float>& values) {
  for (size_t index = 0; index < values.size(); ++index) {
    if (values[index] != values[index - index % kBlock]) return false;
  }
  return true;
}

int refuse(void*, const char*, const double*, int32_t, int32_t, void*, const void*, int64_t, char* error) {
  snprintf(error, HVL_PARAMETERS_ERROR_BYTES, "refused");
  return 1;
}

TEST(a_process_updates_its_own_shards_in_order) {
  Process both;
  Array array(&both, {{both.connect_to_itself(), kNumElements}});
  CHECK(array.create().ok());
  const std::vector<float> ones(kNumElements, 1), few(10, 2);
  std::vector<int64_t> handles;
  for (int round = 0; round < 20; ++round) {
    handles.push_back(array.send(kCopy, 0, ones));
    handles.push_back(array.send(kAdd, 5, few));
    handles.push_back(array.send(kAdd, 0, ones));
    std::vector<float> values(20);
    const int64_t received = array.receive(0, &values);
    CHECK_EQ(both.wait(received).message(), "");
    CHECK_EQ(values[4], 2.0F);
    CHECK_EQ(values[5], 4.0F);
    CHECK_EQ(values[15], 2.0F);
  }
  for (int64_t handle : handles) CHECK_EQ(both.wait(handle).message(), "");
  CHECK(both.wait(array.send_rows(kAdd, {1, 3}, 2, {1, 2, 3, 4})).ok());
  CHECK(array.rows({3, 0, 1}, 2) == std::vector<float>({7, 8, 2, 2, 3, 4}));
}

TEST(updates_of_its_own_and_of_others_add_up) {
  for (const Way way : kWays) {
    Process both, other;
    Array own(&both, {{both.connect_to_itself(), kNumElements}}),
        remote(&other, {{other.connect(way, &both), kNumElements}});
    CHECK(own.create().ok() && remote.create().ok());
    const std::vector<float> ones(kNumElements, 1);
    std::vector<int64_t> of_own, of_other;
    for (int push = 0; push < 10; ++push) {
      of_own.push_back(own.send(kAdd, 0, ones));
      of_other.push_back(remote.send(kAdd, 0, ones));
    }
    for (int64_t handle : of_own) CHECK_EQ(both.wait(handle).message(), "");
    for (int64_t handle : of_other) CHECK_EQ(other.wait(handle).message(), "");
    CHECK(own.all(kNumElements) == std::vector<float>(kNumElements, 20));
    CHECK(remote.all(kNumElements) == std::vector<float>(kNumElements, 20));
  }
}

TEST(a_large_receive_amid_updates_has_whole_blocks) {
  for (const Way way : kWays) {
    Process both, other;
    Array own(&both, {{both.connect_to_itself(), kNumElements}}),
        remote(&other, {{other.connect(way, &both), kNumElements}});
    CHECK(own.create().ok() && remote.create().ok());
    const std::vector<float> ones(kNumElements, 1), one(1, 1);
    std::deque<int64_t> under_way;
    for (int round = 0; round < 5; ++round) {
      for (int push = 0; push < 3; ++push) {
        under_way.push_back(own.send(kAdd, 0, ones));
        under_way.push_back(own.send(kAdd, 3, one));
        under_way.push_back(own.send(Update{Rule::kScaleAdd, {-1}}, 3, one));
      }
      std::vector<float> near(kNumElements), far(kNumElements);
      const int64_t here = own.receive(0, &near), there = remote.receive(0, &far);
      CHECK_EQ(both.wait(here).message(), "");
      CHECK_EQ(other.wait(there).message(), "");
      CHECK(has_whole_blocks(near));
      near[3] = near[0], far[3] = far[0];  // which is changed by itself
      CHECK(has_whole_blocks(far));
      CHECK_EQ(near[0], 3.0F * static_cast<float>(round + 1));
    }
    for (int64_t handle : under_way) CHECK_EQ(both.wait(handle).message(), "");
  }
}

TEST(errors_of_its_own_server_have_its_name) {
  Process both;
  const int64_t number = both.connect_to_itself("server 3");
  Array array(&both, {{number, 3 * kBlock}});
  const std::vector<float> ones(3 * kBlock, 1);
  CHECK_HAS(both.wait(array.send(kAdd, 0, ones)).message(), "server 3: there is no such shard");
  CHECK(array.create().ok());
  Update rule{Rule::kNamed, {}};
  rule.name = "refuse";
  both.node.set_user_rules({refuse, nullptr});
  CHECK_HAS(both.wait(array.send(rule, 0, ones)).message(), "server 3: refused");
  CHECK(both.wait(array.send(kAdd, 0, ones)).ok());
  CHECK(array.all(3 * kBlock) == ones);
}

TEST(arrays_of_another_dtype_than_the_shard_are_a_mismatch_by_each_way) {
  Process server, client;
  std::vector<std::pair<Process*, int64_t>> ways = {{&server, server.connect_to_itself()}};
  for (const Way way : kWays) ways.emplace_back(&client, client.connect(way, &server));
  for (const auto& [process, number] : ways) {
    Array array(process, {{number, 2 * kBlock}});
    CHECK_EQ(array.create().message(), "");
    const std::vector<float> ones(2 * kBlock, 1);
    CHECK_EQ(process->wait(array.send(kCopy, 0, ones)).message(), "");
    for (const DataType dtype : {HVL_INT32, HVL_FLOAT64}) {
      Array other(process, {{number, 2 * kBlock}}, 0, dtype);
      std::vector<float> values(4 * kBlock);
      std::vector<int64_t> handles;
      handles.push_back(process->start([&](ClientRequest* request) {
        return other.array->receive(0, 2 * kBlock, reinterpret_cast<char*>(values.data()), request);
      }));
      const int64_t row = 1;
      handles.push_back(process->start([&](ClientRequest* request) {
        return other.array->receive_rows({&row, 1, 2}, reinterpret_cast<char*>(values.data()), request);
      }));
      handles.push_back(process->start([&](ClientRequest* request) {
        const auto* elements = reinterpret_cast<const char*>(values.data());
        return other.array->send(kAdd, Conversion(), 0, 2 * kBlock, elements, request);
      }));
      for (const int64_t handle : handles) {
        const Status status = process->wait(handle);
        CHECK_EQ(status.code(), HVL_MISMATCH);
        CHECK_HAS(status.message(), "and the shard has elements of float32");
      }
      std::vector<uint64_t> counters(2);
      CHECK_EQ(other.state(Command::Kind::kPull, HVL_COUNTERS, &counters).message(), "");
    }
    CHECK(array.all(2 * kBlock) == ones);
  }
}

TEST(calls_to_its_own_server_end_with_the_connection) {
  Process both;
  const int64_t number = both.connect_to_itself("server 3");
  Array array(&both, {{number, kNumElements}}, 2);
  CHECK(array.create().ok());
  const std::vector<float> ones(kNumElements, 1);
  std::vector<float> values(kNumElements);
  std::vector<int64_t> handles = {array.tick(0)};
  for (int push = 0; push < 10; ++push) handles.push_back(array.send(kAdd, 0, ones));
  handles.push_back(array.receive(0, &values));
  both.node.remove_server(number);
  CHECK_HAS(both.wait(handles[0]).message(), "has closed the connection to server 3");
  for (size_t index = 1; index < handles.size(); ++index) both.wait(handles[index]);
  CHECK_HAS(both.wait(array.send(kAdd, 0, ones)).message(), "has closed the connection to server 3");
  Array again(&both, {{both.connect_to_itself(), kNumElements}}, 2);
  CHECK(has_whole_blocks(again.all(kNumElements)));
  const int64_t last = again.send(kAdd, 0, ones);
  both.node.stop();
  both.wait(last, 0);
}

TEST(the_c_api_connects_a_process_to_itself) {
  hvl_parameters_connection own{};
  own.is_own = 1;
  own.peer = "this process";
  CHECK_EQ(hvl_parameters_add_client(&own), HVL_INVALID_ARGUMENT);
  const int64_t number = hvl_parameters_add_server(&own);
  REQUIRE(number > 0);
  const hvl_parameters_shard shard{number, 2};
  const hvl_parameters_array_config config{1, HVL_FLOAT32, &shard, 1, 0};
  hvl_parameters_array* array = hvl_parameters_open(&config);
  const hvl_parameters_update add{"add", nullptr, 0, HVL_PAYLOAD_FULL, 0};
  const float sent[] = {1, 2};
  float received[2] = {};
  const int64_t handles[] = {hvl_parameters_create(array), hvl_parameters_send(array, &add, 0, 2, sent),
                             hvl_parameters_receive(array, 0, 2, received)};
  for (int64_t handle : handles) CHECK_EQ(hvl_parameters_wait(handle, 10), HVL_OK);
  CHECK(received[0] == 1 && received[1] == 2);
  hvl_parameters_close(array);
  CHECK_EQ(hvl_parameters_stop(), HVL_OK);
}

TEST(the_clock_of_a_process_ends_with_the_connection_to_itself) {
  Process both, other;
  const int64_t number = both.connect_to_itself();
  Array own(&both, {{number, 10}}, 2), remote(&other, {{other.connect(Way::kCopies, &both), 10}}, 2);
  CHECK(own.create().ok() && remote.create().ok());
  const int64_t tick = remote.tick(0);
  CHECK(other.wait(remote.send(kAdd, 0, {1})).ok());
  CHECK(!other.is_done(tick));
  both.node.remove_server(number);
  CHECK_EQ(other.wait(tick).message(), "");
}

TEST(a_connection_to_itself_ends_amid_the_ticks_of_several_clients_of_an_array) {
  for (int round = 0; round < 10; ++round) {  // the order of their clocks is one of chance
    Process both;
    const int64_t number = both.connect_to_itself();
    Array waits(&both, {{number, 10}}, 2), other(&both, {{number, 10}}, 2);
    CHECK(waits.create().ok() && other.create().ok());
    const int64_t tick = waits.tick(0);
    CHECK(both.wait(other.send(kAdd, 0, {1})).ok());
    both.node.remove_server(number);
    CHECK_HAS(both.wait(tick).message(), "has closed the connection");
    Array again(&both, {{both.connect_to_itself(), 10}});
    CHECK_EQ(again.all(10)[0], 1.0F);
  }
}

TEST(memory_of_a_client_that_has_closed_its_connection_is_not_written) {
  Process server, other;
  for (int round = 0; round < 30; ++round) {
    Process client;
    const int64_t number = client.connect(Way::kCopies, &server);
    Array array(&client, {{number, kNumElements}}),
        same(&other, {{other.connect(Way::kCopies, &server), kNumElements}});
    CHECK(array.create().ok());
    CHECK(other.wait(same.send(kCopy, 0, std::vector<float>(kNumElements, 1))).ok());
    std::vector<float> values(kNumElements);
    const int64_t received = array.receive(0, &values);
    client.node.remove_server(number);
    client.wait(received);
    std::fill(values.begin(), values.end(), 2.0F);
    CHECK_EQ(same.all(kNumElements)[0], 1.0F);
    CHECK(std::count(values.begin(), values.end(), 2.0F) == kNumElements);
  }
}

}  // namespace
}  // namespace hvl
