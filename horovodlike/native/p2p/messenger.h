// The messages of this rank: its sends and receives, and the messages that arrive from other ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "p2p/local_links.h"
#include "p2p/match_table.h"
#include "p2p/message_contexts.h"
#include "p2p/message_queue.h"
#include "p2p/peer_link.h"
#include "p2p/remote_links.h"
#include "queue/handle_table.h"
#include "shm/host_memory.h"

namespace hvl {

struct MessengerOptions {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::vector<int> local_ranks;                   // the ranks of this host, by local rank
  std::vector<int> local_pids;                    // likewise; empty: the ranks are threads of one process
  std::function<std::string(int rank)> describe;  // "rank 4 on host b"
  std::shared_ptr<HostMemory> memory;
  std::shared_ptr<Transport> transport;  // null, like the poller, in a job of one host
  Poller* poller = nullptr;
  HandleTable* handles = nullptr;
};

class Messenger final : private MessageEvents {
 public:
  // Throws std::runtime_error on a system error.
  explicit Messenger(MessengerOptions options);
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // Any thread: queues the request, which begins with the next progress(), and returns its handle in *handle.
  Status post(MessageRequestPtr request, int64_t* handle);

  // Only the holder of the engine lock may call the rest.

  // Moves as much as possible without waiting; sets *progressed if anything moved. An error breaks the job.
  Status progress(bool* progressed) {
    const bool is_quiet = queue_.empty() && !local_links_.can_progress() && remote_links_ == nullptr;
    return is_quiet ? Status() : move(progressed);
  }
  // True if progress() would do something. Makes system calls only if requests are pending.
  bool has_news() {
    if (!queue_.empty()) return true;
    if (has_ended()) return false;
    return local_links_.can_progress() || (num_pending_ > 0 && remote_links_ != nullptr && remote_links_->find_ready());
  }
  // True if a message waits for room in shared memory.
  bool awaits_room() const { return local_links_.awaits_room(); }
  // True if a request of this rank has not ended, or this rank awaits the last frames of others.
  bool awaits_peers() const { return num_pending_ > 0 || is_finishing_; }
  // Called now and then. An error means that the job is broken: a peer with which requests are pending is lost.
  Status check();

  // As in MatchTable.
  const MessageRequest* oldest_receive() const { return table_.oldest_receive(); }

  // Process sets, as the log adds and removes them: in the same order on all ranks.
  void add_process_set(int32_t id, std::vector<int> ranks) { contexts_.add(id, std::move(ranks)); }
  void remove_process_set(int32_t id);

  // The log has ended, at the same record on all ranks. In a job of several hosts, tells them that nothing follows.
  void finish();
  // Called when the job is broken, as the last call before end(), until which `why` is borrowed: sends the reason to
  // the ranks of other hosts, as far as their streams take it at once.
  void tell_broken(const std::string& why);
  // True if the last frames to and from all other ranks have been moved, so that end() loses no message; always in a
  // job of one host.
  bool is_finished() const;
  // Called when the job has ended: all requests complete with this error, and so do later ones. But if the job was shut
  // down, a later receive still takes a message that has arrived before.
  void end(const Status& status);
  // Any thread.
  bool has_ended() const { return has_ended_.load(); }
  // In a forked child: see Engine.
  void close_in_child();

 private:
  bool on_message(const MessageHeader& message, const char* payload) override;
  void on_announcement(const MessageHeader& message, const Announcement& announcement) override;
  void on_end(const MessageRequest& request, Status status, const MessageHeader& message) override;

  void connect();
  void begin(MessageRequestPtr request);
  void receive(MessageRequestPtr request);
  void send_to_self(MessageRequestPtr request);
  void deliver(Arrival arrival, MessageRequestPtr receive);
  Status move(bool* progressed);

  const MessengerOptions options_;
  MessageQueue queue_;
  std::vector<MessageRequestPtr> new_requests_;
  MatchTable table_;
  std::vector<std::unique_ptr<PeerLink>> links_;  // by rank; null: this rank's
  LocalLinks local_links_;
  std::unique_ptr<RemoteLinks> remote_links_;  // null: there is one host
  MessageContexts contexts_;
  uint64_t credit_to_self_ = kMessageCredit;  // for small messages of this rank to itself; as in MessageSender
  size_t num_pending_ = 0;                    // requests that have begun and not ended
  bool is_finishing_ = false;
  std::atomic<bool> has_ended_{false};
  Status why_it_ended_;
};

}  // namespace hvl
