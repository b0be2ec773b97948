// Copies to the memory of another rank, which may end meanwhile.
#include "p2p/shm_stream.h"

#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "check.h"

namespace hvl {
namespace {

struct CopyingRanks {
  std::shared_ptr<HostMemory> memory = HostMemory::anonymous(HostShape{2, 4096, 2});
  ShmStream sender{memory, 0, 1, static_cast<int>(getpid())}, receiver{memory, 1, 0, static_cast<int>(getpid())};
  std::atomic<uint32_t>& is_copying = memory->message_ring(0, 1).block->is_copying;
};

// An emulator of processors may not have this call.
bool system_copies() {
  char from = 1, to = 0;
  const iovec here{&from, 1}, there{&to, 1};
  return process_vm_writev(getpid(), &here, 1, &there, 1, 0) == 1 && to == 1;
}

TEST(nothing_is_written_to_the_memory_of_a_rank_that_has_ended) {
  CopyingRanks ranks;
  const std::string sent = "sent";
  std::string received = "----";
  const auto copy = [&] {
    return ranks.sender.copy_to(reinterpret_cast<uintptr_t>(received.data()), sent.data(), sent.size());
  };
  CHECK_EQ(copy(), system_copies());
  CHECK_EQ(received, system_copies() ? sent : "----");
  received = "----";
  ranks.memory->rank(1).ended.store(1);
  CHECK(!copy());
  CHECK_EQ(received, "----");
  CHECK_EQ(ranks.is_copying.load(), 0U);
  CHECK_EQ(ranks.sender.has_refused(), !system_copies());
}

TEST(copies_that_the_system_refuses_are_remembered) {
  char byte = 0;
  CopyingRanks there, back;
  CHECK(!there.sender.copy_to(0, &byte, 1) && there.sender.has_refused());
  CHECK(!back.sender.copy_from(0, &byte, 1) && back.sender.has_refused());
}

TEST(a_copy_under_way_is_awaited) {
  CopyingRanks ranks;
  ranks.is_copying.store(1);
  const uint64_t begin = now_ns();
  std::thread sender([&] {
    while (now_ns() - begin < kCopyPatience / 4) std::this_thread::yield();
    ranks.is_copying.store(0);
  });
  ranks.receiver.await_copies();
  CHECK(now_ns() - begin >= kCopyPatience / 4);
  sender.join();
}

TEST(a_copy_that_does_not_end_is_awaited_for_a_short_time) {
  CopyingRanks ranks;
  ranks.is_copying.store(1);
  const uint64_t begin = now_ns();
  ranks.receiver.await_copies();
  CHECK(now_ns() - begin >= kCopyPatience);
  CHECK(now_ns() - begin < 10 * kSecond);
}

}  // namespace
}  // namespace hvl
