// Elements that are fetched one at a time, and a system that refuses to copy between processes.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p2p/shm_stream.h"
#include "parameter_processes.h"

namespace hvl {
namespace {

// A stream through another one, whose direct copies the system refuses.
struct RefusedStream final : PeerStream {
  const std::unique_ptr<PeerStream> stream;
  std::atomic<int>& num_copies;

  RefusedStream(std::unique_ptr<PeerStream> wrapped, std::atomic<int>* count)
      : stream(std::move(wrapped)), num_copies(*count) {}
  uint64_t send(const void* data, uint64_t num_bytes) override { return stream->send(data, num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) override { return stream->receive(data, num_bytes); }
  bool has_sent(uint64_t end) const override { return stream->has_sent(end); }
  bool has_received(uint64_t end) const override { return stream->has_received(end); }
  Status progress(bool* moved) override { return stream->progress(moved); }
  bool can_progress() const override { return stream->can_progress(); }
  void add_to(std::vector<pollfd>* polled) const override { stream->add_to(polled); }
  void close() override { stream->close(); }
  bool refuse() {
    ++num_copies;
    return false;
  }
  bool can_copy() const override { return true; }
  bool has_refused() const override { return num_copies > 0; }
  bool copy_from(uint64_t, char*, uint64_t) override { return refuse(); }
  bool copy_to(uint64_t, const char*, uint64_t) override { return refuse(); }
};

TEST(a_server_asks_once_for_copies_that_the_system_refuses) {
  for (const bool begins_with_push : {true, false}) {
    std::atomic<int> num_copies{0};
    Process server, client;
    BothEnds ends(Way::kCopies, "a client", "a server");
    ends.server.stream = std::make_unique<RefusedStream>(std::move(ends.server.stream), &num_copies);
    server.node.add_client(std::move(ends.server));
    Array array(&client, {{client.node.add_server(std::move(ends.client)), 4 * HVL_PARAMETERS_BLOCK}});
    CHECK_EQ(array.create().message(), "");
    const std::vector<float> ones(4 * HVL_PARAMETERS_BLOCK, 1);
    if (begins_with_push) CHECK_EQ(client.wait(array.send(kCopy, 0, ones)).message(), "");
    for (int round = 0; round < 5; ++round) array.all(ones.size());
    CHECK_EQ(client.wait(array.send(kCopy, 0, ones)).message(), "");
    CHECK(array.all(ones.size()) == ones);
    CHECK(num_copies >= 1 && num_copies <= 5);  // one to the client, or those from it that were begun together
  }
}

// Fetches elements when those before are here.
struct FetchingSession final : Session {
  std::vector<uint64_t> numbers;
  std::vector<char> elements = std::vector<char>(kEagerBytes);
  size_t num_fetched = 0;

  explicit FetchingSession(std::unique_ptr<PeerStream> stream) : Session("the other end", std::move(stream), nullptr) {}
  using Session::send_elements;

  Status on_batch(Bytes) override { return Status(); }
  Status on_elements(uint64_t number, uint64_t) override {
    numbers.push_back(number);
    if (numbers.size() == 1) fetch(number, elements.data());
    return Status();
  }
  Status on_fetched(uint64_t) override {
    if (++num_fetched < numbers.size()) fetch(numbers[num_fetched], elements.data());
    return Status();
  }
  Status on_sent(uint64_t) override { return Status(); }
  Status before_sending() override { return Status(); }
};

TEST(a_session_can_progress_while_small_elements_that_were_fetched_are_not_handled) {
  constexpr size_t kMessages = 5;
  const auto memory = HostMemory::anonymous(HostShape{2, 4096, 16});
  FetchingSession sender(std::make_unique<ShmStream>(memory, 0, 1, 0));
  FetchingSession receiver(std::make_unique<ShmStream>(memory, 1, 0, 0));
  const std::vector<char> elements(kInlineBytes + 1);
  for (uint64_t number = 1; number <= kMessages; ++number) {
    sender.send_elements(number, elements.data(), elements.size());
  }
  bool progressed = false;
  for (size_t round = 0; round < 4 * kMessages; ++round) CHECK(sender.progress(&progressed).ok());
  CHECK(receiver.progress(&progressed).ok());
  while (receiver.can_progress()) CHECK(receiver.progress(&progressed).ok());
  CHECK_EQ(receiver.num_fetched, kMessages);
}

}  // namespace
}  // namespace hvl
