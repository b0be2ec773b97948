#include "shm/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hvl {

namespace {

constexpr size_t kMessageRingBytes = 256 << 10;
constexpr size_t kLeastMessageRingBytes = 8 << 10;
constexpr size_t kMessageBytesPerRank = 512 << 10;

}  // namespace

size_t HostMemory::message_rings_offset(const HostShape& shape) {
  size_t slots = static_cast<size_t>(shape.ranks) * static_cast<size_t>(shape.slot_depth);
  return round_up(round_up(rank_offset(shape.ranks) + kCacheLine, kPage) + kLogRingBytes +
                      static_cast<size_t>(shape.ranks) * (kRequestRingBytes + sizeof(StackBlock)) +
                      slots * static_cast<size_t>(shape.slot_bytes),
                  kPage);
}

// The rings of a rank to all others have a bounded size, so that the rings of many ranks fit into memory.
size_t HostMemory::message_ring_bytes(int ranks) {
  size_t bytes = kMessageRingBytes;
  while (bytes > kLeastMessageRingBytes && bytes * static_cast<size_t>(ranks - 1) > kMessageBytesPerRank) bytes /= 2;
  return bytes;
}

size_t HostMemory::bytes_needed(const HostShape& shape) {
  const size_t rings = static_cast<size_t>(shape.ranks) * static_cast<size_t>(shape.ranks - 1);
  return message_rings_offset(shape) + rings * (sizeof(MessageBlock) + message_ring_bytes(shape.ranks));
}

MessageRing HostMemory::message_ring(int from, int to) {
  const size_t ranks = static_cast<size_t>(shape_.ranks);
  const size_t index = static_cast<size_t>(from) * (ranks - 1) + static_cast<size_t>(to < from ? to : to - 1);
  const size_t capacity = message_ring_bytes(shape_.ranks);
  char* rings = base_ + message_rings_offset(shape_);
  char* bytes = rings + index * capacity;
  auto* blocks = reinterpret_cast<MessageBlock*>(rings + ranks * (ranks - 1) * capacity);
  return MessageRing{blocks + index, bytes, capacity};
}

Status HostMemory::map(int fd, const HostShape& shape, std::shared_ptr<HostMemory>* memory) {
  size_t bytes = bytes_needed(shape);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return Status(HVL_RESOURCES, std::string("cannot map the shared memory of this host's ranks: ") + strerror(errno));
  }
  memory->reset(new HostMemory(static_cast<char*>(base), bytes, shape));
  return Status();
}

std::shared_ptr<HostMemory> HostMemory::anonymous(const HostShape& shape) {
  size_t bytes = bytes_needed(shape);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  return std::shared_ptr<HostMemory>(new HostMemory(static_cast<char*>(base), bytes, shape));
}

HostMemory::~HostMemory() {
  close_pipes();
  munmap(base_, bytes_);
}

void HostMemory::close_pipes() {
  for (int pipe : pipes_) close(pipe);
  pipes_.clear();
}

Status HostMemory::set_pipes(const std::vector<int>& pipes) {
  for (int pipe : pipes) {
    const int duplicate = fcntl(pipe, F_DUPFD_CLOEXEC, 0);
    if (duplicate == -1) return Status(HVL_RESOURCES, std::string("cannot duplicate a pipe: ") + strerror(errno));
    pipes_.push_back(duplicate);
  }
  return Status();
}

void HostMemory::break_job(const std::string& text) {
  uint32_t whole = 0;
  if (header().broken.compare_exchange_strong(whole, 1)) {
    size_t length = std::min(text.size(), sizeof(header().broken_text) - 1);
    memcpy(header().broken_text, text.data(), length);
    header().broken_text[length] = '\0';
    header().broken.store(2);
  }
  notify_all_but(-1, kWakeAlways);
}

std::string HostMemory::broken_text() {
  // The writer may have been killed between its two stores.
  uint64_t deadline = now_ns() + 100 * kMillisecond;
  while (header().broken.load() == 1 && now_ns() < deadline) {
    timespec pause{0, static_cast<long>(kMillisecond)};
    nanosleep(&pause, nullptr);
  }
  return header().broken.load() == 2 ? header().broken_text : "a rank was lost while it reported a lost rank";
}

void HostMemory::notify_deferring_ranks(int local_rank) {
  for (int peer = 0; peer < shape_.ranks; ++peer) {
    if (peer != local_rank && rank(peer).queued.load() != 0) notify(peer, kWakeNews);
  }
}

void HostMemory::notify_all_but(int local_rank, WakeReason why) {
  for (int peer = 0; peer < shape_.ranks; ++peer) {
    if (peer != local_rank) notify(peer, why);
  }
}

}  // namespace hvl
