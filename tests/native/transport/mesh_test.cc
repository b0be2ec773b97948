// The messages of a mesh about the ranks that it waits for.
#include "transport/tcp/mesh.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "check.h"

namespace hvl {
namespace {

// A mesh with two streams to each of two peers, which do nothing.
class Waiting {
 public:
  Waiting() {
    for (int peer : {1, 2}) {
      for (int stream = 0; stream < 2; ++stream) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
        mesh.add(peer, ends[0], "rank " + std::to_string(peer));
        theirs_.push_back(ends[1]);
      }
    }
  }
  ~Waiting() {
    for (int fd : theirs_) close(fd);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // More than the kernel takes.
  void send(int peer) {
    for (uint64_t turn : {0, 1}) mesh.send(peer, turn, bytes_.data(), bytes_.size());
  }
  void receive(int peer) {
    for (uint64_t turn : {0, 1}) mesh.receive(peer, turn, received_.data() + turn, 1);
  }
  std::string awaited() {
    bool moved = false;
    CHECK(mesh.progress(&moved).ok());
    return mesh.awaited();
  }

  Mesh mesh{3};

 private:
  const std::vector<char> bytes_ = std::vector<char>(16 << 20);
  std::array<char, 2> received_{};
  std::vector<int> theirs_;
};

TEST(those_that_do_not_send_are_named_once) {
  Waiting waiting;
  CHECK_EQ(waiting.awaited(), "");
  waiting.receive(2);
  CHECK_EQ(waiting.awaited(), "rank 2");
  waiting.receive(1);
  CHECK_EQ(waiting.awaited(), "rank 1, rank 2");
}

TEST(those_that_do_not_take_what_they_get_are_named_if_all_that_is_to_come_has_come) {
  Waiting waiting;
  waiting.send(1);
  CHECK_EQ(waiting.awaited(), "rank 1");
  waiting.receive(2);
  CHECK_EQ(waiting.awaited(), "rank 2");
}

}  // namespace
}  // namespace hvl
