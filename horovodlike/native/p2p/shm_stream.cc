#include "p2p/shm_stream.h"

#include <sched.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr size_t kStep = size_t{16} << 10;     // bytes after which the other rank is notified, to overlap the copies
constexpr size_t kAtOnce = size_t{512} << 10;  // bytes moved by one call

// Moves bytes between the next pieces of a transfer and a ring, of which `count` bytes from a position on can be used.
template <typename Copy>
void move_bytes(Transfer* transfer, const MessageRing& ring, uint64_t position, size_t count, Copy&& copy) {
  while (count > 0) {
    const size_t start = static_cast<size_t>(position) & (ring.capacity - 1);
    const iovec& piece = *transfer->next();
    const size_t part = std::min({count, piece.iov_len, ring.capacity - start});
    copy(ring.bytes + start, static_cast<char*>(piece.iov_base), part);
    transfer->advance(part);
    position += part;
    count -= part;
  }
}

// Moves bytes between this process's memory and another's; false: the system does not allow it.
bool move_memory(decltype(process_vm_readv)* move, int pid, uint64_t address, char* here, uint64_t num_bytes) {
  while (num_bytes > 0) {
    const iovec local{here, num_bytes}, remote{reinterpret_cast<void*>(address), num_bytes};
    const ssize_t count = move(pid, &local, 1, &remote, 1, 0);
    if (count <= 0) return false;
    here += count;
    address += static_cast<uint64_t>(count);
    num_bytes -= static_cast<uint64_t>(count);
  }
  return true;
}

}  // namespace

bool ShmStream::can_progress() const {
  const uint64_t written = out_.block->written.load(std::memory_order_relaxed);
  if (!sent_.is_empty() && written - out_.block->read.load() < out_.capacity) return true;
  return !received_.is_empty() && in_.block->written.load() != in_.block->read.load(std::memory_order_relaxed);
}

bool ShmStream::copy_from(uint64_t address, char* to, uint64_t num_bytes) {
  // Once the peer's engine has ended, something else may be in that memory.
  const bool is_copied = move_memory(process_vm_readv, pid_, address, to, num_bytes);
  has_refused_ = has_refused_ || !is_copied;
  return is_copied && memory_->rank(peer_).ended.load() == 0;
}

bool ShmStream::copy_to(uint64_t address, const char* from, uint64_t num_bytes) {
  out_.block->is_copying.store(1);  // before it looks whether the peer has ended, which then waits
  const bool may_copy = memory_->rank(peer_).ended.load() == 0;
  const bool is_copied = may_copy && move_memory(process_vm_writev, pid_, address, const_cast<char*>(from), num_bytes);
  out_.block->is_copying.store(0);
  has_refused_ = has_refused_ || (may_copy && !is_copied);
  return is_copied;
}

void ShmStream::await_copies() {
  const uint64_t deadline = now_ns() + kCopyPatience;
  while (in_.block->is_copying.load() != 0 && now_ns() < deadline) sched_yield();
}

bool ShmStream::write() {
  const uint64_t begin = out_.block->written.load(std::memory_order_relaxed);
  uint64_t written = begin;
  while (!sent_.is_empty() && written - begin < kAtOnce) {
    const size_t room = out_.capacity - static_cast<size_t>(written - out_.block->read.load());
    const size_t count = static_cast<size_t>(std::min<uint64_t>({room, kStep, sent_.num_bytes_left()}));
    if (count == 0) break;
    move_bytes(&sent_, out_, written, count,
               [](char* ring, const char* memory, size_t part) { std::memcpy(ring, memory, part); });
    written += count;
    out_.block->written.store(written);
    // A rank that awaits no message is woken only when the ring buffer is half full.
    const bool is_half_full = room - count < out_.capacity / 2;
    memory_->notify_message(peer_, is_half_full ? kWakeNews : kWakeMessage);
  }
  return written != begin;
}

bool ShmStream::read() {
  const uint64_t begin = in_.block->read.load(std::memory_order_relaxed);
  uint64_t read = begin;
  while (!received_.is_empty() && read - begin < kAtOnce) {
    const size_t here = static_cast<size_t>(in_.block->written.load() - read);
    const size_t count = static_cast<size_t>(std::min<uint64_t>({here, kStep, received_.num_bytes_left()}));
    if (count == 0) break;
    move_bytes(&received_, in_, read, count,
               [](const char* ring, char* memory, size_t part) { std::memcpy(memory, ring, part); });
    read += count;
    in_.block->read.store(read);
    memory_->notify_message(peer_, kWakeRoom);
  }
  return read != begin;
}

}  // namespace hvl
