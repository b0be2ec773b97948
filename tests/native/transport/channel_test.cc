// Channels over real sockets, of both kinds that there are: what the seam leaves open, and peers that send other bytes.
#include "transport/tcp/channel.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "check.h"
#include "connections.h"

namespace hvl {
namespace {

constexpr ChannelKey kUp = {1};
constexpr ChannelKey kDown = {2};
const char* const kPeer = "rank 2 (host b, 10.0.0.3)";

std::pair<int, int> socket_pair() {
  int fds[2];
  make_pair_of_ends(fds);
  return {fds[0], fds[1]};
}

std::pair<int, int> tcp_pair() {
  int fds[2];
  make_tcp_ends(fds);
  return {fds[0], fds[1]};
}

void for_both_kinds(void (*test)(std::pair<int, int> fds)) {
  test(socket_pair());
  test(tcp_pair());
}

void wait_for(int fd, short events) {
  pollfd poller{fd, events, 0};
  REQUIRE(poll(&poller, 1, 30000) == 1);
}

// A channel, and the bare socket at its other end, for what no channel would send.
struct Half {
  explicit Half(std::pair<int, int> fds) : channel(fds.first, kUp, kDown, kPeer), fd(fds.second), sealer(kDown) {}
  ~Half() { hang_up(); }

  void hang_up() {
    if (fd != -1) close(fd);
    fd = -1;
  }
  void reset() {
    const linger at_once{1, 0};
    REQUIRE(setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    hang_up();
  }
  // The bytes are at the other end, or on their way through the loopback device.
  void write(const std::string& bytes) {
    REQUIRE(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }
  std::string sealed(const std::string& payload) {
    ByteQueue stream;
    sealer.seal(payload, &stream);
    return std::string(stream.data(), stream.size());
  }
  // Pumps until a frame, the end or an error is there.
  Status pump() {
    for (;;) {
      bool progressed = false;
      const Status status = channel.pump(&progressed);
      if (!status.ok() || channel.has_frame() || channel.has_ended()) return status;
      if (!progressed) wait_for(channel.fd(), POLLIN);
    }
  }
  std::string next() {
    std::string frame;
    const Status status = pump();
    CHECK_EQ(status.message(), "");
    CHECK(channel.receive(&frame));
    return frame;
  }

  Channel channel;
  int fd;
  Sealer sealer;
};

TEST(a_frame_in_pieces_of_one_byte) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    const std::string wire = half.sealed("a frame");
    bool progressed = false;
    for (char byte : wire) {
      CHECK(!half.channel.has_frame());
      half.write(std::string(1, byte));
      wait_for(half.channel.fd(), POLLIN);
      progressed = false;
      CHECK(half.channel.pump(&progressed).ok());
      CHECK(progressed);
    }
    std::string frame;
    CHECK(half.channel.has_frame());
    CHECK(half.channel.receive(&frame));
    CHECK_EQ(frame, "a frame");
    progressed = false;
    CHECK(half.channel.pump(&progressed).ok());
    CHECK(!progressed);
  });
}

TEST(many_frames_in_one_piece) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    std::string wire;
    for (int i = 0; i < 100; ++i) wire += half.sealed(std::to_string(i));
    half.write(wire);
    for (int i = 0; i < 100; ++i) CHECK_EQ(half.next(), std::to_string(i));
    CHECK(!half.channel.has_frame());
  });
}

TEST(a_pump_reads_a_bounded_amount_and_nothing_while_a_frame_waits) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    std::string wire;
    for (int i = 0; i < 60; ++i) wire += half.sealed(std::string(1000, 'x'));
    half.write(wire);
    CHECK(half.pump().ok());
    bool progressed = false;
    for (int again = 0; again < 10; ++again) CHECK(half.channel.pump(&progressed).ok());
    CHECK(!progressed);
    std::string frame;
    int count = 0;
    while (half.channel.receive(&frame)) ++count;
    CHECK(count > 0);
    CHECK(count <= 32);
    for (; count < 60; ++count) CHECK_EQ(half.next().size(), 1000);
  });
}

TEST(the_longest_frame_and_one_byte_more) {
  const auto fds = tcp_pair();
  Channel a(fds.first, kUp, kDown, kPeer);
  Channel b(fds.second, kDown, kUp, "rank 0 (host a, 10.0.0.2)");
  const std::string longest(kFrameLimit, 'x');
  a.send(longest);
  bool progressed = false;
  while (!b.has_frame()) {
    REQUIRE(a.pump(&progressed).ok());
    REQUIRE(b.pump(&progressed).ok());
  }
  std::string frame;
  CHECK(b.receive(&frame));
  CHECK(frame == longest);
  a.send(longest + 'x');
  const Status status = a.pump(&progressed);
  CHECK_EQ(status.message(),
           std::string("a frame of 16777217 bytes to ") + kPeer + " is over the limit of 16777216 bytes");
  CHECK(b.pump(&progressed).ok());
  CHECK(!b.has_frame());
}

TEST(an_end_in_good_order_closes_one_direction_only) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    half.channel.send("goes out");
    half.channel.finish();
    half.channel.finish();
    CHECK(!half.channel.is_flushed());
    bool progressed = false;
    CHECK(half.channel.pump(&progressed).ok());
    CHECK(half.channel.is_flushed());
    CHECK(!half.channel.has_ended());

    Opener opener(kUp, kPeer);
    for (bool open = true; open;) {
      char bytes[100];
      wait_for(half.fd, POLLIN);
      const ssize_t count = recv(half.fd, bytes, sizeof bytes, 0);
      REQUIRE(count >= 0);
      open = count > 0;
      CHECK(opener.feed(bytes, static_cast<size_t>(count)).ok());
    }
    CHECK(opener.close().ok());

    ByteQueue end;
    const std::string last = half.sealed("still comes in");
    half.sealer.seal_end(&end);
    half.write(last + std::string(end.data(), end.size()));
    CHECK(half.pump().ok());
    CHECK(!half.channel.has_ended());  // before its last frame
    CHECK_EQ(half.next(), "still comes in");
    CHECK(half.pump().ok());
    CHECK(half.channel.has_ended());
    half.hang_up();
    CHECK(half.channel.pump(&progressed).ok());
    CHECK(half.channel.has_ended());
  });
}

TEST(a_peer_that_is_killed) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    half.write(half.sealed("last words"));
    half.hang_up();
    CHECK_EQ(half.next(), "last words");
    const Status status = half.pump();
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_EQ(status.message(),
             std::string(kPeer) + " has closed its connection without a word: its process has ended or was killed");
    CHECK(!half.channel.has_ended());
    half.channel.send("too late");
    CHECK_EQ(half.pump().message(), status.message());
  });
}

TEST(a_peer_that_is_killed_in_the_middle_of_a_frame) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    const std::string wire = half.sealed("last words");
    half.write(wire.substr(0, wire.size() - 1));
    half.hang_up();
    CHECK_EQ(half.pump().message(), std::string(kPeer) + " has closed its connection in the middle of frame 1");
  });
}

TEST(a_reset_is_no_signal_and_comes_after_the_last_words) {
  Half half(tcp_pair());
  const std::string last_words(100000, 'x');  // more than a pump reads
  half.write(half.sealed("first"));
  half.write(half.sealed(last_words));
  half.reset();
  wait_for(half.channel.fd(), POLLHUP);
  half.channel.send("nobody reads this");
  CHECK_EQ(half.next(), "first");
  CHECK(half.next() == last_words);
  const Status status = half.pump();
  CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  CHECK(status.message().find(std::string("the connection to ") + kPeer + " is lost: ") == 0);
  CHECK(!half.channel.is_flushed());
}

TEST(a_wrong_frame_is_told_before_a_reset) {
  Half half(tcp_pair());
  const std::string first = half.sealed("first");
  half.write(half.sealed("second"));
  half.reset();
  wait_for(half.channel.fd(), POLLHUP);
  half.channel.send("nobody reads this");
  CHECK(half.pump().message().find("frame 2 from") == 0);
}

TEST(a_reset_of_a_connection_that_is_only_read) {
  Half half(tcp_pair());
  half.reset();
  CHECK_EQ(half.pump().message(), std::string("the connection to ") + kPeer + " is lost: Connection reset by peer");
}

TEST(frames_that_are_not_the_peers) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    const std::string good = half.sealed("good");
    half.write(good);
    CHECK_EQ(half.next(), "good");
    half.write(good + half.sealed("second"));
    const Status status = half.pump();
    CHECK_EQ(status.message(),
             std::string("frame 1 from ") + kPeer + " came in place of frame 2: it was replayed on the way");
    CHECK(!half.channel.has_frame());
    half.write(half.sealed("third"));
    bool progressed = false;
    CHECK_EQ(half.channel.pump(&progressed).message(), status.message());
    CHECK(!progressed);
  });
}

TEST(a_frame_sent_back_to_where_it_came_from) {
  for_both_kinds([](std::pair<int, int> fds) {
    Half half(fds);
    half.channel.send("mirror");
    bool progressed = false;
    CHECK(half.channel.pump(&progressed).ok());
    wait_for(half.fd, POLLIN);
    char bytes[100];
    const ssize_t count = recv(half.fd, bytes, sizeof bytes, 0);
    half.write(std::string(bytes, static_cast<size_t>(count)));
    CHECK(half.pump().message().find("the MAC of frame 1 from") == 0);
  });
}

TEST(small_frames_do_not_wait_and_the_descriptor_is_closed) {
  const auto fds = tcp_pair();
  {
    Half half(fds);
    int value = 0;
    socklen_t length = sizeof value;
    REQUIRE(getsockopt(fds.first, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0);
    CHECK(value != 0);
    CHECK_EQ(half.channel.fd(), fds.first);
  }
  CHECK(fcntl(fds.first, F_GETFD) == -1 && errno == EBADF);
}

}  // namespace
}  // namespace hvl
