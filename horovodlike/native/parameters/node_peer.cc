#include "parameters/node_peer.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "p2p/shm_stream.h"

namespace hvl {

namespace {

constexpr uint64_t kTimeToLeave = 50 * kMillisecond;

const MessageKeys* keys_of(const PeerConnection& connection) {
  return connection.keys.has_value() ? &*connection.keys : nullptr;
}

}  // namespace

Status PeerConnection::make_local(std::string peer, std::shared_ptr<HostMemory> memory, int local_rank, int pid,
                                  int socket, PeerConnection* connection) {
  const int flags = fcntl(socket, F_GETFL);
  const int duplicate = flags == -1 ? -1 : fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (duplicate == -1 || fcntl(duplicate, F_SETFL, flags | O_NONBLOCK) == -1) {
    const Status status(HVL_RESOURCES, "cannot use the connection to " + peer + ": " + strerror(errno));
    if (duplicate != -1) close(duplicate);
    return status;
  }
  std::unique_ptr<LocalEnd> local(new LocalEnd{memory, local_rank, duplicate});
  const Status status = memory->set_pipes({duplicate, duplicate});  // only the peer is notified
  if (!status.ok()) return status;
  connection->peer = std::move(peer);
  connection->stream = std::make_unique<ShmStream>(std::move(memory), local_rank, 1 - local_rank, pid);
  connection->local = std::move(local);
  return Status();
}

void LocalEnd::close() {
  memory->close_pipes();
  if (socket != -1) ::close(std::exchange(socket, -1));
}

void PeerConnection::close_in_child() {
  if (is_own()) return;
  stream->close();
  if (local != nullptr) local->close();
}

NodePeer::NodePeer(PeerConnection connection, ShardStore* store, Notify notify) : local_(std::move(connection.local)) {
  auto session = std::make_unique<ServerSession>(connection.peer, std::move(connection.stream), keys_of(connection),
                                                 store, [this, notify = std::move(notify)] { notify(this); });
  served_ = session.get();
  session_ = std::move(session);
  fd_ = find_fd();
}

NodePeer::NodePeer(PeerConnection connection, int64_t server, ShardStore* store, ClientCommand::OnEnd on_end,
                   Notify notify)
    : local_(std::move(connection.local)), server_(server) {
  if (connection.is_own()) {
    own_ = std::make_unique<OwnClient>(connection.peer, store, std::move(on_end),
                                       [this, notify = std::move(notify)] { notify(this); });
    return;
  }
  auto session = std::make_unique<ClientSession>(connection.peer, std::move(connection.stream), keys_of(connection),
                                                 std::move(on_end));
  client_ = session.get();
  session_ = std::move(session);
  fd_ = find_fd();
}

// A session always awaits something, so a stream with a descriptor lists it.
int NodePeer::find_fd() const {
  if (is_local()) return local_->socket;
  std::vector<pollfd> polled;
  session_->stream().add_to(&polled);
  return polled.empty() ? -1 : polled[0].fd;
}

void NodePeer::close_in_child() {
  if (own_ != nullptr) return;
  session_->stream().close();
  if (is_local()) local_->close();
}

bool NodePeer::can_progress() const {
  if (own_ != nullptr) return own_->can_progress();
  return session_->can_progress() || (client_ != nullptr ? client_->can_call() : served_->has_more());
}

Status NodePeer::progress(bool* progressed) {
  if (own_ != nullptr) {
    own_->progress(progressed);
    return Status();
  }
  return session_->progress(progressed);
}

Status NodePeer::take_input() {
  if (!is_local()) return Status();
  char bytes[256];
  ssize_t came = 0;
  do {
    came = recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
  } while (came == sizeof bytes);
  const bool is_open = came > 0 || (came == -1 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  if (is_open) return Status();
  local_->memory->rank(1 - local_->local_rank).ended.store(1);  // its process may have been killed
  return Status::lost("the connection to " + name() + " was lost: its process has ended or has closed it");
}

void NodePeer::arm() {
  const uint32_t news = kWakeNews | kWakeMessage;
  doorbell().arm(WaitingParty::kEngineThread, session_->is_sending() ? news | kWakeRoom : news);
}

void NodePeer::leave() {
  if (client_ == nullptr) return;
  client_->leave();
  const uint64_t deadline = now_ns() + kTimeToLeave;
  bool progressed = false;
  while (session_->progress(&progressed).ok() && (session_->is_sending() || session_->can_progress()) &&
         now_ns() < deadline) {
    sched_yield();
  }
}

void NodePeer::end(const Status& why) {
  if (own_ != nullptr) return own_->fail(why);
  // The peer sees that memory of this process may be something else from now on.
  if (is_local()) {
    block().ended.store(1);
    session_->stream().await_copies();
  }
  session_->close();
  if (client_ != nullptr) client_->fail(why);
}

}  // namespace hvl
