#include "p2p/match_table.h"

#include <utility>
#include <vector>

#include "check.h"

namespace hvl {
namespace {

MessageHeader header(int source, int64_t tag, uint64_t num_bytes = 0, uint64_t context = 0) {
  MessageHeader made;
  made.source = source;
  made.tag = tag;
  made.num_bytes = num_bytes;
  made.context = context;
  return made;
}

MessageRequestPtr receive(int source, int64_t tag, int64_t handle, uint64_t context = 0) {
  auto request = std::make_unique<MessageRequest>();
  request->header = header(source, tag, 0, context);
  request->handle = handle;
  return request;
}

// The number of bytes tells arrivals apart.
Arrival arrival(int source, int64_t tag, uint64_t num_bytes, uint64_t context = 0) {
  Arrival made;
  made.header = header(source, tag, num_bytes, context);
  made.has_payload = true;
  return made;
}

int64_t handle_of(const MessageRequestPtr& request) { return request == nullptr ? 0 : request->handle; }

// The bytes of the message that a receive gets; 0: none.
uint64_t taken(MatchTable* table, const MessageHeader& wanted) {
  Arrival found;
  return table->take_arrival(wanted, &found) ? found.header.num_bytes : 0;
}

TEST(receives_of_a_source_and_tag_are_taken_in_their_order) {
  MatchTable table;
  for (int64_t handle : {1, 2, 3}) table.keep(receive(1, 5, handle));
  CHECK_EQ(table.num_receives(), 3);
  CHECK_EQ(handle_of(table.take_receive(header(1, 6))), 0);
  CHECK_EQ(handle_of(table.take_receive(header(2, 5))), 0);
  CHECK_EQ(handle_of(table.take_receive(header(1, 5, 0, 1))), 0);
  for (int64_t handle : {1, 2, 3}) CHECK_EQ(handle_of(table.take_receive(header(1, 5))), handle);
  CHECK_EQ(handle_of(table.take_receive(header(1, 5))), 0);
  CHECK_EQ(table.num_receives(), 0);
}

TEST(a_message_meets_the_first_receive_that_fits_from_its_source_or_any) {
  MatchTable table;
  table.keep(receive(2, 5, 1));
  table.keep(receive(kAnySource, 5, 2));
  table.keep(receive(1, 5, 3));
  CHECK(table.awaits(7));
  CHECK_EQ(handle_of(table.take_receive(header(1, 5))), 2);
  CHECK(!table.awaits(7));
  CHECK(table.awaits(2));
  CHECK_EQ(handle_of(table.take_receive(header(1, 5))), 3);
  CHECK_EQ(handle_of(table.take_receive(header(2, 5))), 1);
}

TEST(messages_are_taken_in_the_order_of_their_arrival) {
  MatchTable table;
  table.keep(arrival(1, 5, 10));
  table.keep(arrival(2, 5, 20));
  table.keep(arrival(1, 5, 30));
  table.keep(arrival(1, 6, 40));
  CHECK_EQ(taken(&table, header(3, 5)), 0u);
  CHECK_EQ(taken(&table, header(2, 5)), 20u);
  CHECK_EQ(taken(&table, header(kAnySource, 5)), 10u);
  CHECK_EQ(taken(&table, header(kAnySource, 5)), 30u);
  CHECK_EQ(taken(&table, header(kAnySource, 5)), 0u);
  CHECK_EQ(taken(&table, header(1, 6)), 40u);
}

TEST(tags_may_be_as_large_as_they_can) {
  MatchTable table;
  const int64_t large = int64_t{1} << 62;
  table.keep(receive(0, large, 1));
  table.keep(receive(0, 0, 2));
  CHECK_EQ(handle_of(table.take_receive(header(0, large))), 1);
  CHECK_EQ(handle_of(table.take_receive(header(0, large))), 0);
  CHECK_EQ(handle_of(table.take_receive(header(0, 0))), 2);
}

TEST(all_of_a_context_leave_the_table) {
  MatchTable table;
  table.keep(receive(1, 5, 1, 1));
  table.keep(receive(1, 6, 2, 1));
  table.keep(receive(1, 5, 3, 2));
  table.keep(arrival(2, 7, 10, 1));
  std::vector<MessageRequestPtr> receives;
  std::vector<Arrival> arrivals;
  table.take_context(1, &receives, &arrivals);
  CHECK_EQ(receives.size(), 2);
  CHECK_EQ(arrivals.size(), 1);
  CHECK_EQ(table.num_receives(), 1);
  CHECK_EQ(handle_of(table.take_receive(header(1, 5, 0, 1))), 0);
  CHECK_EQ(handle_of(table.take_receive(header(1, 5, 0, 2))), 3);
}

TEST(at_the_end_only_messages_that_are_here_can_stay) {
  for (bool keeps : {true, false}) {
    MatchTable table;
    table.keep(receive(1, 5, 1));
    table.keep(arrival(2, 6, 10));
    Arrival announced = arrival(2, 6, 20);
    announced.has_payload = false;
    table.keep(std::move(announced));
    Arrival own = arrival(0, 7, 30);
    own.has_payload = false;
    own.send = receive(0, 7, 2);
    table.keep(std::move(own));
    std::vector<MessageRequestPtr> requests;
    table.take_requests(&requests, keeps);
    CHECK_EQ(requests.size(), 2);
    CHECK_EQ(table.num_receives(), 0);
    CHECK_EQ(taken(&table, header(2, 6)), keeps ? 10u : 0u);
    CHECK_EQ(taken(&table, header(2, 6)), 0u);
    CHECK_EQ(taken(&table, header(0, 7)), 0u);
  }
}

}  // namespace
}  // namespace hvl
