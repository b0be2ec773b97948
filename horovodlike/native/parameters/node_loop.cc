#include "parameters/node_loop.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/log.h"

namespace hvl {

namespace {

constexpr int kMostReady = 64;
constexpr int kLastRounds = 64;  // rounds of reading from a peer that has ended

void copy_out(const ClientCommand& command) {
  const char* from = command.received;
  for (const iovec& destination : command.destinations) {
    std::memcpy(destination.iov_base, from, destination.iov_len);
    from += destination.iov_len;
  }
}

// Calls function(), for which the memory may not suffice.
template <typename Function>
Status catch_no_memory(const std::string& peer, Function&& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return Status(HVL_RESOURCES, "no memory for the messages of " + peer);
  }
}

void leave(NodePeer* peer) {
  catch_no_memory(peer->name(), [&] {
    peer->leave();
    return Status();
  });
}

}  // namespace

NodeLoop::NodeLoop(HandleTable* handles, int call, std::mutex* peers_mutex)
    : handles_(*handles), epoll_(epoll_create1(EPOLL_CLOEXEC)), peers_mutex_(*peers_mutex) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ != -1 && epoll_ctl(epoll_, EPOLL_CTL_ADD, call, &event) == 0) return;
  const std::string why = strerror(errno);
  if (epoll_ != -1) close(epoll_);
  throw std::runtime_error("cannot watch the connections of parameter servers: " + why);
}

NodeLoop::~NodeLoop() { close(epoll_); }

void NodeLoop::add_client(PeerConnection connection) {
  const std::string name = connection.peer;
  const Status status = catch_no_memory(name, [&] {
    add(std::make_unique<NodePeer>(std::move(connection), &store_, [this](NodePeer* peer) { mark_ready(peer); }));
    return Status();
  });
  if (!status.ok()) log(LogLevel::kWarning, "a client of this parameter server is dropped: " + status.message());
}

void NodeLoop::add_server(PeerConnection connection, int64_t server) {
  const std::string name = connection.peer;
  Server& added = servers_[server];
  added.ended = catch_no_memory(name, [&] {
    const auto on_end = [this](ClientCommand* command, const Status& status) { end(command, status); };
    auto peer = std::make_unique<NodePeer>(std::move(connection), server, &store_, on_end,
                                           [this](NodePeer* ready) { mark_ready(ready); });
    NodePeer* made = peer.get();
    add(std::move(peer));
    added.peer = made;
    return Status();
  });
}

void NodeLoop::add(std::unique_ptr<NodePeer> peer) {
  NodePeer* added = peer.get();
  peers_.push_back(std::move(peer));
  if (added->is_local()) local_.push_back(added);
  if (added->fd() != -1) watch(added, EPOLL_CTL_ADD);
  mark_ready(added);
}

void NodeLoop::watch(NodePeer* peer, int operation) {
  epoll_event event{};
  event.events = peer->watches_room ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = peer;
  if (epoll_ctl(epoll_, operation, peer->fd(), &event) == 0) return;
  failed_.emplace_back(
      peer, Status(HVL_RESOURCES, "cannot watch the connection to " + peer->name() + ": " + strerror(errno)));
}

void NodeLoop::remove_server(int64_t server) {
  const auto found = servers_.find(server);
  if (found == servers_.end() || found->second.peer == nullptr) return;
  leave(found->second.peer);
  drop(found->second.peer,
       Status(HVL_SHUT_DOWN, "this process has closed the connection to " + found->second.peer->name()));
}

void NodeLoop::stop() {
  const Status why(HVL_SHUT_DOWN, "this process has stopped its parameter servers and clients");
  while (!peers_.empty()) {
    NodePeer* peer = peers_.back().get();
    leave(peer);
    drop(peer, why);
  }
  handles_.wake_waiters();
  has_completed_ = false;
}

void NodeLoop::begin(std::unique_ptr<ClientRequest> request) {
  ClientRequest* begun = request.release();  // until its last command has ended
  begun->num_left = begun->commands.size() + 1;
  for (ClientCommand& command : begun->commands) {
    command.request = begun;
    const Status status = catch_no_memory("a server", [&] { return call_server(&command); });
    if (!status.ok()) end(&command, status);
  }
  complete(begun);
}

Status NodeLoop::call_server(ClientCommand* command) {
  const auto found = servers_.find(command->server);
  if (found == servers_.end()) {
    return Status(HVL_INVALID_ARGUMENT, "there is no server " + std::to_string(command->server));
  }
  NodePeer* peer = found->second.peer;
  if (peer == nullptr) return found->second.ended;
  mark_ready(peer);
  peer->call(command);
  return Status();
}

void NodeLoop::end(ClientCommand* command, const Status& status) {
  ClientRequest* request = command->request;
  if (status.ok()) {
    copy_out(*command);
  } else if (request->status.ok()) {
    request->status = status;
  }
  complete(request);
}

void NodeLoop::complete(ClientRequest* request) {
  if (--request->num_left > 0) return;
  handles_.complete(request->handle, std::move(request->status), {});
  has_completed_ = true;
  delete request;
}

void NodeLoop::mark_ready(NodePeer* peer) {
  if (!peer->is_ready) ready_.push_back(peer);
  peer->is_ready = true;
}

bool NodeLoop::can_progress() const {
  const auto can = [](const NodePeer* peer) { return peer->can_progress(); };
  return !ready_.empty() || !failed_.empty() || std::any_of(local_.begin(), local_.end(), can);
}

void NodeLoop::find_ready(int milliseconds) {
  epoll_event events[kMostReady];
  const int count = epoll_wait(epoll_, events, kMostReady, milliseconds);
  for (int index = 0; index < count; ++index) {
    auto* peer = static_cast<NodePeer*>(events[index].data.ptr);
    if (peer == nullptr) continue;  // a call
    mark_ready(peer);
    Status status = peer->take_input();
    if (status.ok()) continue;
    bool progressed = false;  // data that came before the end is handled
    for (int round = 0; round < kLastRounds && peer->can_progress(); ++round) {
      if (!catch_no_memory(peer->name(), [&] { return peer->progress(&progressed); }).ok()) break;
    }
    failed_.emplace_back(peer, std::move(status));
  }
}

bool NodeLoop::progress() {
  bool progressed = false;
  for (NodePeer* peer : local_) {
    if (peer->can_progress()) mark_ready(peer);
  }
  for (NodePeer* peer : std::exchange(ready_, {})) {
    peer->is_ready = false;
    progress(peer, &progressed);
  }
  for (auto& [peer, why] : std::exchange(failed_, {})) {
    drop(peer, why);
    progressed = true;
  }
  if (std::exchange(has_completed_, false)) handles_.wake_waiters();
  return progressed;
}

void NodeLoop::progress(NodePeer* peer, bool* progressed) {
  Status status = catch_no_memory(peer->name(), [&] { return peer->progress(progressed); });
  if (!status.ok()) {
    failed_.emplace_back(peer, std::move(status));
    return;
  }
  if (peer->can_progress()) mark_ready(peer);
  if (peer->waits_for_room() != peer->watches_room) {
    peer->watches_room = !peer->watches_room;
    watch(peer, EPOLL_CTL_MOD);
  }
}

void NodeLoop::drop(NodePeer* peer, const Status& why) {
  const auto owner = std::find_if(peers_.begin(), peers_.end(), [&](const auto& each) { return each.get() == peer; });
  if (owner == peers_.end()) return;  // it has failed twice
  if (peer->fd() != -1) epoll_ctl(epoll_, EPOLL_CTL_DEL, peer->fd(), nullptr);
  if (peer->server() == 0 && !peer->has_left() && why.code() != HVL_SHUT_DOWN) {
    log(LogLevel::kWarning, "a client of this parameter server is dropped: " + why.message());
  }
  if (peer->server() != 0) servers_[peer->server()] = Server{nullptr, why};
  local_.erase(std::remove(local_.begin(), local_.end(), peer), local_.end());
  ready_.erase(std::remove(ready_.begin(), ready_.end(), peer), ready_.end());
  peer->is_ready = true;  // nothing puts it there again
  peer->end(why);
  has_completed_ = true;
  std::unique_ptr<NodePeer> dropped;  // ticks of other clients may end now, and mark their peers
  {
    const std::lock_guard<std::mutex> lock(peers_mutex_);
    dropped = std::move(*owner);
    peers_.erase(owner);
    dropped = nullptr;
  }
}

void NodeLoop::arm() {
  for (NodePeer* peer : local_) peer->arm();
}

void NodeLoop::disarm() {
  for (NodePeer* peer : local_) peer->disarm();
}

void NodeLoop::check_answered() {
  for (const auto& peer : peers_) {
    Status status = peer->check_answered();
    if (!status.ok()) failed_.emplace_back(peer.get(), std::move(status));
  }
}

void NodeLoop::close_in_child() {
  close(epoll_);
  for (const auto& peer : peers_) peer->close_in_child();
}

}  // namespace hvl
