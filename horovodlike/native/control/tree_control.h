// The control plane of the leader of a host (its local rank 0) in a job of several hosts. Hosts form a tree: requests
// go up from child to parent, the log goes down, and on each host they go through its ring buffers. The root host's
// leader holds the coordinator; the others aggregate the requests of their subtree (negotiate/aggregator.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "control/coordinator_host.h"
#include "control/leader_rings.h"
#include "negotiate/aggregator.h"
#include "transport/transport.h"

namespace hvl {

// The connections of a leader to its neighbours in the tree, and the operations that both kinds of leaders have in
// common.
class TreeLeader : public ControlPlane {
 public:
  // `ranks`, `pids`: as in StackDumpRequests. `connections`: to the parent, unless this is the root, then to the
  // children.
  TreeLeader(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::vector<int> pids,
             std::vector<std::unique_ptr<Connection>> connections, bool has_parent);

  Status send(const Message& message) override { return accept_local(0, message, now_ns()); }
  Status pump(bool* progressed) override;
  Status next(Record* record, bool* found) override;
  bool has_news() override;
  bool is_flushed() override;
  void finish() override;
  Status check_other_hosts() override;
  void tell_broken(const std::string& text) override;
  void close_in_child() override;

 protected:
  // Accepts a message made on behalf of the ranks that it names. `came`: its time of arrival, by this host's clock.
  virtual Status accept(const Message& message, uint64_t came) = 0;
  // Acts on all accepted messages.
  virtual Status decide() = 0;
  // True if decide() has something to do.
  virtual bool has_to_decide() = 0;
  // Notes a record from the parent, before it is passed on.
  virtual void observe(const Record&) {}

  // Sends the record to this host and all below it.
  void publish(Record record, const std::vector<int>& concerned_ranks);
  void send_up(const Message& message);
  // Publishes to this host and all below it that the coordinator asks about missing ranks.
  void show_inquiry();
  // Publishes to this host how long others have waited for its ranks.
  void show(const std::vector<StragglerStats>& stats) { rings_.show(stats, ranks_); }

  const std::shared_ptr<HostMemory> memory_;
  StackDumpRequests stacks_;

 private:
  enum class Frame : char { kMessage = 'M', kRecord = 'R', kBroken = 'B', kInquiry = 'I', kMoved = 'V', kStacks = 'S' };

  Status accept_local(int local_rank, const Message& message, uint64_t sent);
  Status take_frame(size_t from);
  Status pump_connections(bool* progressed);
  Status receive_all(bool* progressed);
  // Sends the frame to the neighbours from the first one on, but one.
  void send_frame(size_t first, size_t except = SIZE_MAX);
  void begin_frame(Frame type) { frame_.assign(1, static_cast<char>(type)); }
  bool next_is_public() const;

  LeaderRings rings_;
  const std::vector<int> ranks_;
  const std::vector<std::unique_ptr<Connection>> connections_;
  const size_t first_child_;    // its index in connections_
  bool log_has_ended_ = false;  // hosts that have run its last record may leave
  bool is_finished_ = false;
  bool is_asked_ = false;    // the parent wants the stacks of this host's ranks
  uint64_t told_moved_ = 0;  // the value of HostHeader::moved_here of which the neighbours know
  std::string frame_;
  Message message_;
  Record record_;
};

// The leader of the root host.
class TreeRoot : public TreeLeader {
 public:
  TreeRoot(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options, std::vector<int> ranks,
           std::vector<int> pids, std::vector<std::unique_ptr<Connection>> children);

  Status check_stalls() override {
    return coordinator_host_.check_stalls(&stacks_, memory_->moved_at(), [this] { show_inquiry(); });
  }
  void set_fusion_threshold(int64_t num_bytes) override { coordinator_host_.set_fusion_threshold(num_bytes); }

 protected:
  Status accept(const Message& message, uint64_t came) override { return coordinator_host_.accept(message, came); }
  Status decide() override;
  bool has_to_decide() override { return coordinator_host_.has_messages(); }

 private:
  CoordinatorHost coordinator_host_;
};

// The leader of any other host.
class TreeNode : public TreeLeader {
 public:
  // `below`: the ranks of this host and of all below it.
  TreeNode(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::vector<int> pids, RankSet below,
           std::vector<std::unique_ptr<Connection>> connections);

  Status check_stalls() override { return Status(); }

 protected:
  Status accept(const Message& message, uint64_t came) override { return aggregator_.accept(message, came); }
  Status decide() override;
  bool has_to_decide() override { return aggregator_.next_deadline() <= now_ns(); }
  uint64_t next_deadline() const override { return aggregator_.next_deadline(); }
  void observe(const Record& record) override { aggregator_.observe(record); }

 private:
  Aggregator aggregator_;
  std::vector<Message> messages_;
};

}  // namespace hvl
