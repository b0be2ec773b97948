// The claims of pieces by two threads that are the two ranks.
#include "p2p/joint_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"

namespace hvl {
namespace {

constexpr int kMessages = 200;

struct Ends {
  std::shared_ptr<HostMemory> memory = HostMemory::anonymous(HostShape{2, 1 << 16, 2});
  JointCopyBlock* block = &memory->message_ring(0, 1).block->joint_copy;
  JointCopy sender{memory, 1, block}, receiver{memory, 0, block};
};

uint64_t bytes_of(uint64_t message) { return (1 + message % 5) * kPieceBytes - message; }

TEST(each_piece_is_copied_once_and_complete_means_that_all_are_there) {
  Ends ends;
  std::vector<std::vector<char>> sent;
  for (uint64_t id = 0; id < kMessages; ++id) sent.emplace_back(bytes_of(id), static_cast<char>(id + 1));
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> num_helped{0};
  std::thread sender([&] {
    JointCopy::Piece piece;
    while (!is_over.load()) {
      if (!ends.sender.claim(&piece)) continue;
      std::memcpy(reinterpret_cast<char*>(piece.address), sent[piece.id].data() + piece.offset, piece.num_bytes);
      ++num_helped;
      ends.sender.end(piece, true);
    }
  });
  for (uint64_t id = 0; id < kMessages; ++id) {
    std::vector<char> received(bytes_of(id));
    ends.receiver.begin(id, received.data(), received.size());
    while (num_helped.load() == 0) std::this_thread::yield();
    JointCopy::Piece piece;
    while (!ends.receiver.is_complete()) {
      if (!ends.receiver.claim(&piece)) continue;
      CHECK_EQ(piece.id, id);
      std::memcpy(received.data() + piece.offset, sent[id].data() + piece.offset, piece.num_bytes);
      ends.receiver.add(piece);
    }
    CHECK(received == sent[id]);
    CHECK(!ends.receiver.has_pieces());
  }
  is_over.store(true);
  sender.join();
  CHECK(num_helped.load() > 0);
}

TEST(the_receiver_learns_that_the_sender_could_not_copy) {
  Ends ends;
  char memory[8];
  ends.receiver.begin(7, memory, sizeof memory);
  JointCopy::Piece piece;
  CHECK(ends.sender.claim(&piece));
  CHECK_EQ(piece.id, uint64_t{7});
  CHECK(!ends.receiver.claim(&piece));
  CHECK(!ends.receiver.is_complete());
  ends.sender.end(piece, false);
  CHECK(ends.receiver.is_complete());
  CHECK(ends.receiver.has_failed());
  ends.receiver.begin(8, memory, sizeof memory);
  CHECK(!ends.receiver.has_failed());
}

TEST(closing_waits_for_the_pieces_of_the_sender) {
  Ends ends;
  std::vector<char> received(8 * kPieceBytes);
  ends.receiver.begin(1, received.data(), received.size());
  JointCopy::Piece piece;
  CHECK(ends.sender.claim(&piece));
  std::atomic<bool> is_closing{false};
  std::thread sender([&] {
    while (!is_closing.load()) std::this_thread::yield();
    std::memset(reinterpret_cast<char*>(piece.address), 1, piece.num_bytes);
    ends.sender.end(piece, true);
  });
  is_closing.store(true);
  ends.receiver.close();
  CHECK_EQ(std::count(received.begin(), received.end(), 1), static_cast<ptrdiff_t>(kPieceBytes));
  CHECK(!ends.sender.claim(&piece));
  sender.join();
}

}  // namespace
}  // namespace hvl
