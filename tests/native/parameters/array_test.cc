// Arrays of parameters on one or several servers: elements, rows, payloads, rules of the user, and state.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "parameter_processes.h"

namespace hvl {
namespace {

TEST(an_array_on_several_servers_is_updated_and_read_as_one) {
  for (const Way way : kWays) {
    Process servers[2], client;
    constexpr int64_t kFirst = 3 * HVL_PARAMETERS_BLOCK + 17, kRest = 5 * HVL_PARAMETERS_BLOCK + 1;
    const std::vector<hvl_parameters_shard> shards = {{client.connect(way, &servers[0]), kFirst},
                                                      {client.connect(way, &servers[1]), kRest}};
    Array array(&client, shards);
    CHECK_EQ(array.create().message(), "");
    CHECK_EQ(array.create().message(), "");
    const std::vector<float> values = counted(kFirst + kRest);
    CHECK_EQ(client.wait(array.send(kCopy, 0, values)).message(), "");
    const std::vector<float> few(100, 2);
    const int64_t handles[] = {array.send(kAdd, kFirst - 50, few), array.send(kAdd, kFirst - 50, few)};
    std::vector<float> expected(values);
    for (size_t i = kFirst - 50; i < kFirst + 50; ++i) expected[i] += 4;
    CHECK(array.all(values.size()) == expected);
    for (int64_t handle : handles) CHECK_EQ(client.wait(handle).message(), "");
    CHECK_EQ(client.wait(array.send(kCopy, 0, {})).message(), "");
  }
}

TEST(shards_that_differ_are_refused_and_both_are_named) {
  Process server, client;
  const int64_t number = client.connect(Way::kRing, &server);
  CHECK(Array(&client, {{number, 10}}, 2).create().ok());
  CHECK_HAS(Array(&client, {{number, 11}}).create().message(),
            "a server: a shard of 11 elements of float32 cannot be created: there is one of 10 elements of float32");
  CHECK_HAS(Array(&client, {{number, 10}}, 0, HVL_INT32).create().message(), "10 elements of int32 cannot be created");
  CHECK_HAS(Array(&client, {{number, 10}}, 3).create().message(),
            "for 3 clients cannot be created: there is one for 2");
  Array huge(&client, {{number, int64_t{1} << 50}});
  CHECK_HAS(huge.create().message(), "there is one of 10 elements");
  Array array(&client, {{number, 10}});
  const auto remove = [&](ClientRequest* request) { return array.array->remove(request); };
  CHECK(client.wait(client.start(remove)).ok());
  CHECK_HAS(client.wait(client.start(remove)).message(), "a server: there is no such shard");
  CHECK_HAS(client.wait(array.send(kAdd, 0, {1})).message(), "there is no such shard");
  CHECK_EQ(huge.create().code(), HVL_RESOURCES);
}

TEST(rows_are_updated_in_order_and_may_lie_on_two_servers) {
  for (const Way way : kWays) {
    Process servers[2], client;
    constexpr int64_t kLength = 7;  // of 100 rows; row 50 is on both servers
    Array array(&client, {{client.connect(way, &servers[0]), 353}, {client.connect(way, &servers[1]), 347}});
    CHECK(array.create().ok());
    const std::vector<int64_t> indices = {50, 3, 99, 50, 3, 0};
    const std::vector<float> pushed = counted(indices.size() * kLength, 1);
    std::vector<float> expected(100 * kLength);
    const Update scale{Rule::kScaleAdd, {2}};
    CHECK_EQ(client.wait(array.send_rows(scale, indices, kLength, pushed)).message(), "");
    for (size_t row = 0; row < indices.size(); ++row) {
      for (size_t i = 0; i < kLength; ++i) {
        expected[static_cast<size_t>(indices[row]) * kLength + i] += 2 * pushed[row * kLength + i];
      }
    }
    CHECK(array.all(expected.size()) == expected);
    CHECK_EQ(client.wait(array.send_rows(kCopy, {5, 5}, kLength, counted(2 * kLength))).message(), "");
    const std::vector<float> read = array.rows({99, 5, 50, 99}, kLength);
    for (size_t i = 0; i < kLength; ++i) {
      CHECK_EQ(read[i], expected[99 * kLength + i]);
      CHECK_EQ(read[kLength + i], static_cast<float>(kLength + i));
      CHECK_EQ(read[2 * kLength + i], expected[50 * kLength + i]);
      CHECK_EQ(read[3 * kLength + i], read[i]);
    }
    CHECK_EQ(client.wait(array.send_rows(kZero, {99}, kLength, {})).message(), "");
    CHECK(array.rows({99}, kLength) == std::vector<float>(kLength));
  }
}

TEST(many_rows_and_long_ones_are_cut_into_several_commands) {
  Process servers[2], client;
  constexpr int64_t kLength = 300000;
  Array array(&client, {{client.connect(Way::kCopies, &servers[0]), 700001},
                        {client.connect(Way::kCopies, &servers[1]), 799999}});
  CHECK(array.create().ok());
  const std::vector<int64_t> indices = {4, 2, 0, 2};
  const std::vector<float> pushed = counted(indices.size() * kLength);
  CHECK_EQ(client.wait(array.send_rows(kCopy, indices, kLength, pushed)).message(), "");
  CHECK(array.rows({4, 0, 2}, kLength) == [&] {
    std::vector<float> expected(pushed.begin(), pushed.begin() + kLength);
    expected.insert(expected.end(), pushed.begin() + 2 * kLength, pushed.begin() + 4 * kLength);
    return expected;
  }());
  std::vector<int64_t> many(200000);
  for (size_t row = 0; row < many.size(); ++row) many[row] = static_cast<int64_t>(row * 7919 % 500000);
  const std::vector<float> ones(many.size() * 3, 1);
  CHECK_EQ(client.wait(array.send_rows(kCopy, many, 3, ones)).message(), "");
  CHECK(array.rows(many, 3) == ones);
}

TEST(bad_calls_are_refused_at_the_client) {
  std::unique_ptr<ClientArray> array;
  const hvl_parameters_shard shard{1, 10};
  CHECK(ClientArray::make({1, HVL_FLOAT32, &shard, 1, 0}, &array).ok());
  ClientRequest request;
  std::vector<float> values(10);
  char* memory = reinterpret_cast<char*>(values.data());
  const int64_t beyond = 5, negative = -1;
  CHECK_HAS(array->send(kAdd, {}, 5, 6, memory, &request).message(), "6 elements from 5 on are not in an array of 10");
  CHECK_HAS(array->receive(-1, 2, memory, &request).message(), "2 elements from -1 on");
  CHECK_HAS(array->send(kAdd, {}, 0, 10, nullptr, &request).message(), "no memory");
  CHECK_HAS(array->send_rows(kAdd, {}, {&beyond, 1, 2}, memory, &request).message(), "row 5 is not in an array of 5");
  CHECK_HAS(array->receive_rows({&negative, 1, 2}, memory, &request).message(), "row -1");
  CHECK_HAS(array->receive_rows({&beyond, 1, 0}, memory, &request).message(), "the length 0");
  CHECK_HAS(array->tick(1, &request).message(), "no clocks");
  CHECK_HAS(array->send(Update{Rule::kSgd, {1.0 / 0.0}}, {}, 0, 1, memory, &request).message(), "not finite");
  CHECK_HAS(array->move_state(Command::Kind::kPull, 4, memory, &request).message(), "no such state");
  CHECK_HAS(array->move_state(Command::Kind::kPush, HVL_UPDATES, memory, &request).message(), "no such state");
  CHECK(ClientArray::make({1, HVL_INT32, &shard, 1, 0}, &array).ok());
  CHECK_HAS(array->send(kAdd, {HVL_PAYLOAD_INT8, false}, 0, 1, memory, &request).message(), "int32");
  CHECK_HAS(ClientArray::make({1, HVL_INT32, &shard, 0, 0}, &array).message(), "no shards");
  CHECK(request.commands.empty());
}

TEST(narrow_payloads_are_near_and_their_errors_are_fed_back) {
  for (const Payload payload : {HVL_PAYLOAD_BFLOAT16, HVL_PAYLOAD_INT8}) {
    Process server, client;
    const size_t count = 2 * HVL_PARAMETERS_BLOCK + 77;
    Array array(&client, {{client.connect(Way::kCopies, &server), static_cast<int64_t>(count)}});
    CHECK(array.create().ok());
    std::vector<float> pushed(count);
    for (size_t i = 0; i < count; ++i) pushed[i] = std::sin(static_cast<float>(i));
    float worst[2] = {0, 0};
    for (const bool feeds_back : {false, true}) {
      CHECK(client.wait(array.send(kZero, 0, pushed)).ok());
      for (int push = 0; push < 50; ++push) {
        CHECK_EQ(client.wait(array.send(kAdd, 0, pushed, {payload, feeds_back})).message(), "");
      }
      const std::vector<float> sum = array.all(count);
      for (size_t i = 0; i < count; ++i) {
        worst[feeds_back] = std::max(worst[feeds_back], std::fabs(sum[i] / 50 - pushed[i]));
      }
    }
    CHECK(worst[false] < 0.01);
    CHECK(worst[true] < 0.2 * worst[false]);
  }
}

TEST(errors_that_are_fed_back_become_part_of_the_values_whatever_the_next_rule_is) {
  Process server, client;
  Array array(&client, {{client.connect(Way::kRing, &server), 3}});
  CHECK(array.create().ok());
  const Conversion int8{HVL_PAYLOAD_INT8, true};
  const std::vector<float> pushed = {127, 0.4F, -0.3F}, zeros(3);
  CHECK(client.wait(array.send(kAdd, 0, pushed, int8)).ok());
  CHECK((array.all(3) == std::vector<float>{127, 0, 0}));
  CHECK(client.wait(array.send(Update{Rule::kMomentum, {0.5, 0}}, 0, zeros, int8)).ok());  // not its errors
  CHECK(client.wait(array.send(Update{Rule::kSgd, {0}}, 0, pushed, int8)).ok());           // without effect
  CHECK((array.all(3) == std::vector<float>{127, 0, 0}));
  for (const Update& update : {Update{Rule::kSgd, {0.01}}, Update{Rule::kScaleAdd, {1e-3}}, kAdd}) {
    CHECK(client.wait(array.send(update, 0, zeros, int8)).ok());
  }
  const std::vector<float> values = array.all(3);
  for (size_t i = 0; i < 3; ++i) CHECK(std::fabs(values[i] - pushed[i]) < 1e-5);
}

int32_t halve(void* context, const char* name, const double* arguments, int32_t num_arguments, int32_t dtype,
              void* values, const void* pushed, int64_t count, char* error) {
  if (std::string(name) != "halve") {
    snprintf(error, HVL_PARAMETERS_ERROR_BYTES, "no rule '%s', but 'halve'", name);
    return 1;
  }
  CHECK(context == nullptr && num_arguments == 1 && dtype == HVL_FLOAT32);
  for (int64_t i = 0; i < count; ++i) {
    static_cast<float*>(values)[i] =
        static_cast<float>(arguments[0]) * (static_cast<float*>(values)[i] + static_cast<const float*>(pushed)[i]);
  }
  return 0;
}

TEST(rules_of_the_user_are_carried_out_at_the_server) {
  Process server, client;
  Array array(&client, {{client.connect(Way::kCopies, &server), 1 << 20}});
  CHECK(array.create().ok());
  const std::vector<float> values = counted(1 << 20);
  Update rule{Rule::kNamed, {0.5}};
  rule.num_arguments = 1;
  rule.name = "halve";
  CHECK_HAS(client.wait(array.send(rule, 0, values)).message(), "no rule 'halve': the rules are zero, copy");
  server.node.set_user_rules({halve, nullptr});
  while (!client.wait(array.send(rule, 0, values)).ok()) {
  }
  std::vector<float> expected(values);
  for (float& value : expected) value *= 0.5F;
  CHECK(array.all(values.size()) == expected);
  rule.name = std::string(HVL_PARAMETERS_NAME_BYTES, 'x');
  CHECK_HAS(client.wait(array.send(rule, 0, values)).message(), "a server: no rule '" + rule.name + "', but 'halve'");
}

TEST(the_state_of_rules_moves_to_other_servers) {
  Process servers[3], client;
  const Update adam{Rule::kAdam, {0.1, 0.9, 0.99, 1e-8}};
  constexpr int64_t kFirst = HVL_PARAMETERS_BLOCK + 5, kRest = 2 * HVL_PARAMETERS_BLOCK;
  Array array(&client,
              {{client.connect(Way::kRing, &servers[0]), kFirst}, {client.connect(Way::kTcp, &servers[1]), kRest}});
  Array restored(&client, {{client.connect(Way::kCopies, &servers[2]), kFirst},
                           {client.connect(Way::kCopies, &servers[2]), kRest}});
  CHECK(array.create().ok() && restored.create().ok());
  const std::vector<float> pushed = counted(kFirst + kRest);
  const auto push = [&](Array* to, int times) {
    for (int round = 0; round < times; ++round) CHECK(client.wait(to->send(adam, 0, pushed)).ok());
    CHECK(client.wait(to->send_rows(adam, {2, 3, 2}, 2, {1, 2, 3, 4, 5, 6})).ok());
  };
  push(&array, 2);
  std::vector<float> values = array.all(pushed.size()), mean(values.size()), square(values.size());
  std::vector<uint64_t> counters(4);
  CHECK_EQ(array.state(Command::Kind::kPull, HVL_SLOT_0, &mean).message(), "");
  CHECK(array.state(Command::Kind::kPull, HVL_SLOT_1, &square).ok());
  CHECK(array.state(Command::Kind::kPull, HVL_COUNTERS, &counters).ok());
  CHECK((counters == std::vector<uint64_t>{3, 2, 2, 2}));
  CHECK(client.wait(restored.send(kCopy, 0, values)).ok());
  CHECK_EQ(restored.state(Command::Kind::kPush, HVL_SLOT_0, &mean).message(), "");
  CHECK(restored.state(Command::Kind::kPush, HVL_SLOT_1, &square).ok());
  CHECK(restored.state(Command::Kind::kPush, HVL_COUNTERS, &counters).ok());
  std::vector<uint64_t> updates(2), later(2);
  CHECK(array.state(Command::Kind::kPull, HVL_UPDATES, &updates).ok());
  push(&array, 1);
  push(&restored, 1);
  CHECK(array.state(Command::Kind::kPull, HVL_UPDATES, &later).ok());
  CHECK(updates[0] < later[0] && updates[1] < later[1]);
  CHECK(array.all(values.size()) == restored.all(values.size()));
}

}  // namespace
}  // namespace hvl
