// The connection between a client and a server of parameters: batches of commands or replies, and messages of elements.
// Each end is derived from Session.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "p2p/peer_link.h"
#include "parameters/command.h"

namespace hvl {

// Not thread-safe. Received data is passed to the functions that the end overrides, in the order of its arrival.
class Session : private MessageEvents {
 public:
  // `peer`: the other end, for errors. `keys`: as in FrameCoder.
  Session(const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  virtual ~Session() { close(); }

  // Moves bytes and handles received data, without waiting. An error ends this session only.
  Status progress(bool* progressed);
  bool can_progress() const { return !out_.empty() || !fetched_.empty() || link_.can_progress(); }
  // True if there is something to send, now or later.
  bool is_sending() const { return link_.is_sending(); }
  PeerStream& stream() const { return link_.stream(); }
  const std::string& peer() const { return peer_; }
  // Gives up all memory of elements; progress() must not be called any more.
  void close();

 protected:
  virtual Status on_batch(Bytes batch) = 0;
  // The other end has begun to send elements. They stay there until fetch().
  virtual Status on_elements(uint64_t number, uint64_t num_bytes) = 0;
  // The elements are in the memory that was given to fetch().
  virtual Status on_fetched(uint64_t number) = 0;
  // The memory that was given to send_elements() is not needed any more.
  virtual Status on_sent(uint64_t number) = 0;
  // Called before anything is sent: the time to put items that had to wait.
  virtual Status before_sending() = 0;

  // Takes a command, or a reply, for the next progress().
  template <typename Item, typename... Elements>
  void put(const Item& item, Elements... elements) {
    if (out_.size() >= kBatchBytes) flush();
    append(item, elements..., &out_);
  }
  // The last batch of on_batch(), or one before, has been handled: its sender may send as many bytes more.
  void give_credit(uint64_t num_bytes) { link_.give_credit(num_bytes); }
  // Sends the items that were put.
  void flush();
  // Sends elements, which are borrowed until on_sent().
  void send_elements(uint64_t number, const char* elements, uint64_t num_bytes);
  // Receives the elements that on_elements() has announced.
  void fetch(uint64_t number, char* memory);
  size_t num_batches_under_way() const { return sent_batches_.size(); }
  Status wrong(const std::string& what) const;

 private:
  // A batch with the largest push in it is as long as an eager message may be.
  static constexpr uint64_t kBatchBytes = kEagerBytes - kInlineBytes - kMostCommandBytes;

  struct Arrived {
    MessageHeader header;
    Announcement announcement;
    Bytes bytes;  // unless the sender keeps them
    bool is_here = false;
  };

  bool on_message(const MessageHeader& message, const char* payload) override;
  void on_announcement(const MessageHeader& message, const Announcement& announcement) override;
  void on_end(const MessageRequest& request, Status status, const MessageHeader& message) override;

  void keep(Arrived arrived);
  Status handle();

  const std::string peer_;
  Bytes out_;
  std::unordered_map<int64_t, Bytes> sent_batches_;  // by the handles of their sends
  std::unordered_map<uint64_t, Arrived> elements_;   // by number, until fetch()
  std::deque<Arrived> batches_;                      // until on_batch(), in the order in which they were sent
  std::vector<uint64_t> begun_, fetched_, sent_;     // numbers of elements, since the last progress()
  int64_t next_handle_ = 1;
  Status status_;  // the last error in received data
  PeerLink link_;
};

}  // namespace hvl
