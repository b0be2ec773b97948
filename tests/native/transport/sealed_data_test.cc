// Sealed frames of data: by themselves, and on a stream with the test as the network between both ends.
#include "transport/tcp/sealed_data.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "transport/tcp/stream.h"

namespace hvl {
namespace {

constexpr ChannelKey kDataKey = {4, 5, 6};
constexpr ChannelKey kBackKey = {7, 8, 9};
const char* const kSender = "rank 2 on host b";
constexpr char kUntouched = '\x55';

std::string some_bytes(size_t count, unsigned seed = 1) {
  std::string bytes(count, ' ');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>((i * 7919 + seed) >> 3);
  return bytes;
}

// The frames of these payloads, each as it is on the wire.
std::vector<std::string> data_frames(const std::vector<std::string>& payloads, const ChannelKey& key = kDataKey) {
  DataSealer sealer(key);
  std::vector<std::string> frames;
  for (const std::string& payload : payloads) {
    Transfer sent;
    sent.add(const_cast<char*>(payload.data()), payload.size());
    frames.emplace_back();
    while (!sent.is_empty()) {
      sealer.seal(sent);
      frames.back().append(sealer.data(), sealer.size());
      sealer.drop(sealer.size());
      sent.advance(sealer.payload_bytes());
    }
  }
  return frames;
}

// The result of an opener for the bytes of a stream.
struct Opened {
  std::string memory;
  uint64_t moved = 0;
  Status status;
};

Opened open_all(const std::string& stream, size_t asked, const ChannelKey& key = kDataKey, size_t piece = SIZE_MAX) {
  Opened opened;
  opened.memory.assign(asked, kUntouched);
  DataOpener opener(key, kSender);
  Transfer received;
  received.add(opened.memory.data(), asked);
  opened.status = opener.open(&received);
  for (size_t fed = 0; fed < stream.size() && !received.is_empty() && opened.status.ok();) {
    size_t most;
    char* room = opener.room(&most);
    const size_t part = std::min({piece, most, stream.size() - fed});
    REQUIRE(part > 0);
    stream.copy(room, part, fed);
    fed += part;
    opener.add(part);
    opened.status = opener.open(&received);
  }
  opened.moved = received.moved();
  return opened;
}

// Nothing but a beginning of what was sent has come, and the rest of the memory is as it was.
void check_only_good(const Opened& opened, const std::string& sent) {
  const size_t moved = static_cast<size_t>(opened.moved);
  CHECK(opened.memory.compare(0, moved, sent, 0, moved) == 0);
  CHECK_EQ(static_cast<size_t>(
               std::count(opened.memory.begin() + static_cast<int64_t>(moved), opened.memory.end(), kUntouched)),
           opened.memory.size() - moved);
}

std::string joined(const std::vector<std::string>& parts) {
  std::string whole;
  for (const std::string& part : parts) whole += part;
  return whole;
}

const std::vector<std::string> kSmall = {some_bytes(10, 1), some_bytes(1, 2), some_bytes(33, 3)};

// The same computed in Python: hmac.digest(bytes([4, 5, 6] + [0] * 29), struct.pack("<QI", 0, 3), "sha256")[:16] and so
// on: number 0 for the length of the first frame, 1 for its payload.
TEST(frames_of_data_are_what_they_always_were) {
  std::string hex;
  for (unsigned char byte : joined(data_frames({"abc", "abc"}))) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  CHECK_EQ(hex,
           "030000003f83aa561985df7980c37ed0a5528e9a616263228d6db74c0540e027d686a32d097ea5"
           "030000006e7d30907456153a3294734e173169b961626314a8f359c51f0a15ec7a2f7ae57f2108");
}

TEST(data_of_all_sizes_comes_out_in_pieces_of_all_sizes) {
  for (size_t size :
       {size_t{1}, size_t{1000}, kDataPayload - 1, kDataPayload, kDataPayload + 1, 3 * kDataPayload + 7}) {
    const std::string sent = some_bytes(size);
    const std::string stream = joined(data_frames({sent}));
    CHECK_EQ(stream.size(), size + (size + kDataPayload - 1) / kDataPayload * (kDataHeader + kMacBytes));
    for (size_t piece : {size_t{1}, size_t{37}, size_t{50000}, SIZE_MAX}) {
      if (piece == 1 && size > kDataPayload) continue;
      const Opened opened = open_all(stream, size, kDataKey, piece);
      CHECK_EQ(opened.status.message(), "");
      CHECK_EQ(opened.moved, uint64_t{size});
      CHECK(opened.memory == sent);
    }
  }
}

TEST(what_has_come_waits_until_it_is_asked_for) {
  const std::string sent = some_bytes(100);
  const std::string stream = joined(data_frames({sent}));
  DataOpener opener(kDataKey, kSender);
  std::string memory(100, kUntouched);
  Transfer received;
  size_t most;
  stream.copy(opener.room(&most), stream.size());
  opener.add(stream.size());
  for (size_t asked = 0; asked < 100; asked += 10) {
    CHECK(opener.open(&received).ok());
    CHECK_EQ(received.moved(), uint64_t{asked});
    received.add(memory.data() + asked, 10);
    CHECK(opener.open(&received).ok());
  }
  CHECK(memory == sent);
}

TEST(any_change_of_any_byte_is_noticed_at_once) {
  const std::string sent = joined(kSmall);
  const std::string stream = joined(data_frames(kSmall));
  for (size_t position = 0; position < stream.size(); ++position) {
    for (int bit : {0, 3, 7}) {
      std::string changed = stream;
      changed[position] ^= static_cast<char>(1 << bit);
      const Opened opened = open_all(changed, sent.size());
      CHECK_EQ(opened.status.code(), HVL_JOB_BROKEN);
      CHECK_HAS(opened.status.message(), "from rank 2 on host b is wrong: it was changed on the way");
      check_only_good(opened, sent);
      CHECK(opened.moved <= position);
    }
  }
}

TEST(changes_in_a_large_stream) {
  const std::string sent = some_bytes(4 * kDataPayload + 99);
  const std::string stream = joined(data_frames({sent}));
  for (size_t position = 1; position < stream.size(); position += stream.size() / 23) {
    std::string changed = stream;
    changed[position] ^= 1;
    const Opened opened = open_all(changed, sent.size());
    const std::string frame = std::to_string(position / kDataFrame + 1);
    CHECK_EQ(opened.status.message(), "the MAC of data frame " + frame +
                                          " from rank 2 on host b is wrong: it was changed on the way, or the other "
                                          "side has another key");
    CHECK_EQ(opened.moved, uint64_t{position / kDataFrame * kDataPayload});
    check_only_good(opened, sent);
  }
}

TEST(replayed_reordered_and_dropped_frames) {
  const std::vector<std::string> payloads = {some_bytes(9, 1), some_bytes(9, 2), some_bytes(9, 3)};
  const std::vector<std::string> frames = data_frames(payloads);
  const std::string sent = joined(payloads);
  const std::string from = " from rank 2 on host b";
  struct Case {
    std::string stream, message;
  };
  const Case cases[] = {
      {frames[0] + frames[0], "data frame 1" + from + " came in place of data frame 2: it was replayed on the way"},
      {frames[0] + frames[2] + frames[1], "data frame 3" + from +
                                              " came in place of data frame 2: it was reordered, or others were "
                                              "dropped, on the way"},
      {frames[1],
       "data frame 2" + from + " came in place of data frame 1: it was reordered, or others were dropped, on the way"},
      {frames[0] + frames[1].substr(0, kDataHeader) + frames[0].substr(kDataHeader),
       "the MAC of data frame 2" + from + " is wrong: it was changed on the way, or the other side has another key"},
  };
  for (const Case& each : cases) {
    const Opened opened = open_all(each.stream, sent.size());
    CHECK_EQ(opened.status.message(), each.message);
    check_only_good(opened, sent);
  }
}

TEST(another_key_and_a_mirror) {
  const std::string stream = joined(data_frames(kSmall, kBackKey));
  const Opened opened = open_all(stream, 44);
  CHECK_HAS(opened.status.message(), "the MAC of data frame 1 from rank 2 on host b is wrong");
  CHECK_EQ(opened.moved, uint64_t{0});
}

TEST(truncated_data_is_not_there) {
  const std::string sent = joined(kSmall);
  const std::vector<std::string> frames = data_frames(kSmall);
  const std::string stream = joined(frames);
  for (size_t length = 0; length < stream.size(); ++length) {
    const Opened opened = open_all(stream.substr(0, length), sent.size());
    CHECK(opened.status.ok());
    uint64_t whole = 0;
    for (size_t index = 0, end = 0; index < frames.size(); ++index) {
      end += frames[index].size();
      if (end <= length) whole += kSmall[index].size();
    }
    CHECK_EQ(opened.moved, whole);
    check_only_good(opened, sent);
  }
}

TEST(an_error_is_final) {
  const std::vector<std::string> frames = data_frames(kSmall);
  DataOpener opener(kDataKey, kSender);
  std::string memory(44, kUntouched);
  Transfer received;
  received.add(memory.data(), memory.size());
  for (const std::string& stream : {frames[1], frames[0]}) {
    size_t most;
    stream.copy(opener.room(&most), stream.size());
    opener.add(stream.size());
    CHECK_HAS(opener.open(&received).message(), "data frame 2");
  }
  CHECK_EQ(received.moved(), uint64_t{0});
}

// Two streams, and the test between them.
struct Line {
  Line() {
    int left[2], right[2];
    for (int* ends : {left, right}) {
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    }
    a = std::make_unique<Stream>(left[0], "rank 1", std::make_unique<DataSeal>(kDataKey, kBackKey, "rank 1"));
    b = std::make_unique<Stream>(right[0], "rank 0", std::make_unique<DataSeal>(kBackKey, kDataKey, "rank 0"));
    at_a = left[1], at_b = right[1];
  }
  ~Line() {
    close(at_a);
    close(at_b);
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  static std::string take(int fd) {
    std::string bytes(1 << 18, ' ');
    const ssize_t count = recv(fd, bytes.data(), bytes.size(), 0);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
    return bytes;
  }
  static void put(int fd, const std::string& bytes) {
    REQUIRE(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }

  std::unique_ptr<Stream> a, b;
  int at_a, at_b;
};

TEST(both_directions_of_a_sealed_stream) {
  Line line;
  const std::string up = some_bytes(1000001, 1), down = some_bytes(700001, 2);
  std::string at_a(down.size(), kUntouched), at_b(up.size(), kUntouched);
  const uint64_t sent = line.a->send(up.data(), up.size());
  line.b->send(down.data(), down.size());
  line.a->receive(at_a.data(), at_a.size());
  line.b->receive(at_b.data(), 1);  // the rest is asked for when it has come
  line.b->receive(at_b.data() + 1, at_b.size() - 1);
  bool is_done = false;
  for (int round = 0; !is_done && round < 10000; ++round) {
    bool moved = false;
    for (Stream* stream : {line.a.get(), line.b.get()}) CHECK_EQ(stream->progress(&moved).message(), "");
    std::string bytes = Line::take(line.at_a);
    CHECK(!line.a->has_sent(sent) || bytes.size() > 0 || moved || line.a->is_idle());
    // Bytes that the other side's socket does not take are sent again.
    for (auto [to, from] :
         {std::pair<int, std::string>{line.at_b, std::move(bytes)}, {line.at_a, Line::take(line.at_b)}}) {
      for (size_t put = 0; put < from.size();) {
        const ssize_t part = send(to, from.data() + put, from.size() - put, MSG_NOSIGNAL);
        if (part > 0) put += static_cast<size_t>(part);
        for (Stream* stream : {line.a.get(), line.b.get()}) CHECK(stream->progress(&moved).ok());
      }
    }
    is_done = line.a->is_idle() && line.b->is_idle();
  }
  CHECK(is_done);
  CHECK(at_a == down);
  CHECK(at_b == up);
}

TEST(memory_that_is_written_while_it_is_sent_makes_no_frame_wrong) {
  Line line;
  std::string data(2000, 'x'), got(2000, kUntouched);
  line.a->send(data.data(), data.size());
  bool moved = false;
  CHECK(line.a->progress(&moved).ok());
  data.assign(2000, 'y');
  Line::put(line.at_b, Line::take(line.at_a));
  line.b->receive(got.data(), got.size());
  CHECK_EQ(line.b->progress(&moved).message(), "");
  CHECK(got == std::string(2000, 'x'));
}

TEST(a_sealed_stream_that_is_cut_at_the_end_of_a_frame) {
  Line line;
  const std::string data = some_bytes(100);
  std::string got(200, kUntouched);
  line.a->send(data.data(), data.size());
  bool moved = false;
  CHECK(line.a->progress(&moved).ok());
  Line::put(line.at_b, Line::take(line.at_a));
  shutdown(line.at_b, SHUT_RDWR);
  line.b->receive(got.data(), got.size());
  CHECK(line.b->progress(&moved).ok());
  CHECK(!line.b->has_received(200));
  const Status status = line.b->progress(&moved);
  CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  CHECK_HAS(status.message(), "the connection to rank 0 was lost: it has closed it in the middle of a transfer");
}

TEST(a_sealed_stream_says_who_sent_what_was_changed) {
  Line line;
  const std::string data = some_bytes(100);
  std::string got(100, kUntouched);
  line.a->send(data.data(), data.size());
  bool moved = false;
  CHECK(line.a->progress(&moved).ok());
  std::string wire = Line::take(line.at_a);
  wire[50] ^= 1;
  Line::put(line.at_b, wire);
  line.b->receive(got.data(), got.size());
  const std::string flaw = "the MAC of data frame 1 from rank 0 is wrong";
  CHECK_HAS(line.b->progress(&moved).message(), flaw);
  CHECK_HAS(line.b->progress(&moved).message(), flaw);
  CHECK(got == std::string(100, kUntouched));
}

}  // namespace
}  // namespace hvl
