// A transport whose bytes stay in this process: the ranks are threads, and every connection is a pair of bounded pipes
// in memory. What works over it relies on no property of sockets.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "hvl.h"
#include "transport/byte_queue.h"
#include "transport/transport.h"

namespace hvl {

// A descriptor that is readable from signal() to drain(). Any thread may signal.
class Wakeup {
 public:
  Wakeup() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) { REQUIRE(fd_ != -1); }
  ~Wakeup() { close(); }
  Wakeup(const Wakeup&) = delete;
  Wakeup& operator=(const Wakeup&) = delete;

  void signal() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ != -1 && !std::exchange(is_set_, true)) eventfd_write(fd_, 1);
  }
  void drain() {
    const std::lock_guard<std::mutex> lock(mutex_);
    eventfd_t ignored;
    if (fd_ != -1 && std::exchange(is_set_, false)) eventfd_read(fd_, &ignored);
  }
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fd_ != -1) ::close(fd_);
    fd_ = -1;
  }
  int fd() const { return fd_; }

 private:
  std::mutex mutex_;
  bool is_set_ = false;
  int fd_;  // its owner may read it without the mutex
};

// One direction between two ranks.
class MemoryPipe {
 public:
  explicit MemoryPipe(size_t capacity) : capacity_(capacity) {}

  // Sets the descriptor of one side.
  void wake_writer(const std::shared_ptr<Wakeup>& wakeup) {
    const std::lock_guard<std::mutex> lock(mutex_);
    writer_ = wakeup;
  }
  void wake_reader(const std::shared_ptr<Wakeup>& wakeup) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reader_ = wakeup;
  }
  // As send() and recv() of a socket: how many bytes were moved; 0: the pipe is closed; -1: none can be moved now.
  ssize_t write(const void* bytes, size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t part = std::min(count, capacity_ - bytes_.size());
    if (is_closed_ || part == 0) return is_closed_ ? 0 : -1;
    bytes_.append(bytes, part);
    if (reader_ != nullptr) reader_->signal();
    return static_cast<ssize_t>(part);
  }
  ssize_t read(void* bytes, size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t part = std::min(count, bytes_.size());
    if (part == 0) return is_closed_ ? 0 : -1;
    std::memcpy(bytes, bytes_.data(), part);
    if (writer_ != nullptr && bytes_.size() == capacity_) writer_->signal();
    bytes_.drop(part);
    return static_cast<ssize_t>(part);
  }
  // Either side. The bytes that were written can still be read.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    for (const auto& side : {writer_, reader_}) {
      if (side != nullptr) side->signal();
    }
  }

 private:
  const size_t capacity_;
  std::mutex mutex_;
  ByteQueue bytes_;
  bool is_closed_ = false;
  std::shared_ptr<Wakeup> writer_, reader_;
};

using PipePtr = std::shared_ptr<MemoryPipe>;

class MemoryConnection final : public Connection {
 public:
  MemoryConnection(PipePtr out, PipePtr in, std::string peer)
      : out_(std::move(out)), in_(std::move(in)), peer_(std::move(peer)) {
    out_->wake_writer(wakeup_);
    in_->wake_reader(wakeup_);
  }
  ~MemoryConnection() override { close(); }

  void send(const std::string& frame) override {
    if (frame.size() <= kFrameLimit) {
      queue(static_cast<uint32_t>(frame.size()));
      outbox_.append(frame.data(), frame.size());
    } else {
      fail("a frame of " + std::to_string(frame.size()) + " bytes to " + peer_ + " is too long");
    }
  }
  void finish() override {
    if (!std::exchange(is_finishing_, true)) queue(kEnd);
  }
  Status pump(bool* progressed) override {
    if (is_over()) return failure_;
    wakeup_->drain();
    const bool can_write = write(progressed);
    bool has_read = false;
    if (!read(&has_read)) fail(peer_ + " has closed its connection before its end");
    *progressed |= has_read;
    if (!can_write && !has_read && !has_frame()) fail("the connection to " + peer_ + " is lost");
    if (is_over()) close();
    return failure_;
  }
  bool receive(std::string* frame) override {
    if (!has_frame()) return false;
    frame->assign(inbox_.data() + sizeof(uint32_t), length());
    inbox_.drop(sizeof(uint32_t) + length());
    return true;
  }
  void close() override {
    out_->close();
    in_->close();
    wakeup_->close();
  }

  bool has_frame() const override {
    return has_length() && length() != kEnd && inbox_.size() - sizeof(uint32_t) >= length();
  }
  bool has_ended() const override { return has_length() && length() == kEnd; }
  bool is_over() const override { return !failure_.ok() || (is_finishing_ && is_flushed() && has_ended()); }
  bool is_flushed() const override { return outbox_.empty(); }
  int fd() const override { return wakeup_->fd(); }
  const std::string& peer() const override { return peer_; }

 private:
  static constexpr uint32_t kEnd = UINT32_MAX;
  static constexpr size_t kReadBytes = size_t{32} << 10;  // in one call of pump()

  void queue(uint32_t length) { outbox_.append(&length, sizeof length); }
  bool has_length() const { return inbox_.size() >= sizeof(uint32_t); }
  uint32_t length() const {
    uint32_t length;
    std::memcpy(&length, inbox_.data(), sizeof length);
    return length;
  }
  void fail(const std::string& why) {
    if (failure_.ok()) failure_ = Status(HVL_JOB_BROKEN, why);
  }
  // These return false if the peer has closed the pipe.
  bool write(bool* progressed) {
    if (outbox_.empty()) return true;
    const ssize_t count = out_->write(outbox_.data(), outbox_.size());
    if (count > 0) outbox_.drop(static_cast<size_t>(count));
    *progressed |= count > 0;
    return count != 0;
  }
  bool read(bool* progressed) {
    if (has_frame() || has_ended()) return true;
    char bytes[kReadBytes];
    const ssize_t count = in_->read(bytes, sizeof bytes);
    if (count > 0) inbox_.append(bytes, static_cast<size_t>(count));
    *progressed |= count > 0;
    return count != 0;
  }

  const PipePtr out_, in_;
  const std::string peer_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();
  ByteQueue outbox_, inbox_;
  bool is_finishing_ = false;
  Status failure_;
};

class MemoryMesh final : public Mesh {
 public:
  ~MemoryMesh() override { close_in_child(); }

  void add(int rank, PipePtr out, PipePtr in, const std::string& peer) {
    out->wake_writer(wakeup_);
    in->wake_reader(wakeup_);
    streams_[rank].push_back(Stream{std::move(out), std::move(in), peer, Transfer(), Transfer()});
  }

  uint64_t send(int rank, uint64_t turn, const void* data, uint64_t num_bytes) override {
    return use(rank, turn, num_bytes).sent.add(const_cast<void*>(data), num_bytes);
  }
  uint64_t receive(int rank, uint64_t turn, void* data, uint64_t num_bytes) override {
    return use(rank, turn, num_bytes).received.add(data, num_bytes);
  }
  bool has_sent(int rank, uint64_t turn, uint64_t end) const override { return at(rank, turn).sent.moved() >= end; }
  bool has_received(int rank, uint64_t turn, uint64_t end) const override {
    return at(rank, turn).received.moved() >= end;
  }
  bool is_idle() const override { return active_.empty(); }
  Status progress(bool* moved) override {
    wakeup_->drain();
    std::string lost;
    for (Stream* stream : active_) {
      const bool can_send = move(&stream->sent, moved,
                                 [&](const iovec& piece) { return stream->out->write(piece.iov_base, piece.iov_len); });
      const bool can_receive = move(&stream->received, moved, [&](const iovec& piece) {
        return stream->in->read(piece.iov_base, piece.iov_len);
      });
      if (lost.empty() && !(can_send && can_receive)) lost = stream->peer;
    }
    active_.erase(std::remove_if(active_.begin(), active_.end(), is_done), active_.end());
    return lost.empty() ? Status() : Status::lost("the connection to " + lost + " was lost");
  }
  void close_in_child() override {
    for (auto& [rank, streams] : streams_) {
      for (Stream& stream : streams) {
        stream.out->close();
        stream.in->close();
      }
    }
    wakeup_->close();
  }

  void add_to(std::vector<pollfd>* polled) const override { polled->push_back({wakeup_->fd(), POLLIN, 0}); }
  std::string awaited() const override {
    const auto receives = [](const Stream* stream) { return !stream->received.is_empty(); };
    const bool any_receives = std::any_of(active_.begin(), active_.end(), receives);
    std::set<std::string> peers;
    for (const Stream* stream : active_) {
      if (receives(stream) || !any_receives) peers.insert(stream->peer);
    }
    std::string text;
    for (const std::string& peer : peers) text += (text.empty() ? "" : ", ") + peer;
    return text;
  }
  Status check_answered() const override { return Status(); }

 private:
  struct Stream {
    PipePtr out, in;
    std::string peer;
    Transfer sent, received;
  };

  Stream& at(int rank, uint64_t turn) {
    std::vector<Stream>& streams = streams_.at(rank);
    return streams[turn % streams.size()];
  }
  const Stream& at(int rank, uint64_t turn) const { return const_cast<MemoryMesh*>(this)->at(rank, turn); }
  static bool is_done(const Stream* stream) { return stream->sent.is_empty() && stream->received.is_empty(); }
  Stream& use(int rank, uint64_t turn, uint64_t num_bytes) {
    Stream& stream = at(rank, turn);
    if (num_bytes > 0 && is_done(&stream)) active_.push_back(&stream);
    return stream;
  }
  // Returns false if the pipe is closed.
  template <typename Move>
  static bool move(Transfer* transfer, bool* moved, Move&& move_piece) {
    while (!transfer->is_empty()) {
      const ssize_t count = move_piece(*transfer->next());
      if (count <= 0) return count < 0;
      transfer->advance(static_cast<uint64_t>(count));
      *moved = true;
    }
    return true;
  }

  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();
  std::map<int, std::vector<Stream>> streams_;  // by rank
  std::vector<Stream*> active_;                 // that have something to move
};

// The pipes between the ranks of a job.
class MemoryNetwork {
 public:
  MemoryNetwork(int size, int num_streams, size_t capacity)
      : size_(size), num_streams_(num_streams), capacity_(capacity) {}

  int size() const { return size_; }
  int num_streams() const { return num_streams_; }
  PipePtr pipe(hvl_use use, int from, int to, int stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    PipePtr& pipe = pipes_[{use, from, to, stream}];
    if (pipe == nullptr) pipe = std::make_shared<MemoryPipe>(capacity_);
    return pipe;
  }
  void cut_off(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, pipe] : pipes_) {
      if (std::get<1>(key) == rank || std::get<2>(key) == rank) pipe->close();
    }
  }

 private:
  const int size_, num_streams_;
  const size_t capacity_;
  std::mutex mutex_;
  std::map<std::tuple<hvl_use, int, int, int>, PipePtr> pipes_;
};

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(std::shared_ptr<MemoryNetwork> network, int rank) : network_(std::move(network)), rank_(rank) {}

  std::unique_ptr<Connection> connect(int rank, const std::string& peer) override {
    return std::make_unique<MemoryConnection>(network_->pipe(HVL_CONTROL, rank_, rank, 0),
                                              network_->pipe(HVL_CONTROL, rank, rank_, 0), peer);
  }
  std::unique_ptr<Mesh> make_mesh(const std::function<std::string(int rank)>& name_of) override {
    auto mesh = std::make_unique<MemoryMesh>();
    for (int rank = 0; rank < network_->size(); ++rank) {
      for (int stream = 0; stream < network_->num_streams() && rank != rank_; ++stream) {
        mesh->add(rank, network_->pipe(HVL_DATA, rank_, rank, stream), network_->pipe(HVL_DATA, rank, rank_, stream),
                  name_of(rank));
      }
    }
    return mesh;
  }
  std::unique_ptr<Mesh> make_message_stream(int rank, const std::string& peer, std::optional<MessageKeys>*) override {
    auto mesh = std::make_unique<MemoryMesh>();
    mesh->add(rank, network_->pipe(HVL_MESSAGES, rank_, rank, 0), network_->pipe(HVL_MESSAGES, rank, rank_, 0), peer);
    return mesh;
  }

 private:
  const std::shared_ptr<MemoryNetwork> network_;
  const int rank_;
};

}  // namespace hvl
