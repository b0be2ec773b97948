#include "transport/tcp/tcp_transport.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "transport/tcp/channel.h"

namespace hvl {

namespace {

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy == -1) throw std::runtime_error(std::string("cannot duplicate a connection: ") + strerror(errno));
  return copy;
}

class TcpTransport : public Transport {
 public:
  TcpTransport(std::vector<hvl_connection> connections, bool seals_data)
      : connections_(std::move(connections)), seals_data_(seals_data) {}

  std::unique_ptr<Connection> connect(int rank, const std::string& peer) override {
    const hvl_connection& connection = find(HVL_CONTROL, rank, peer);
    return std::make_unique<Channel>(duplicate(connection.fd), connection.send_key, connection.receive_key, peer);
  }

  std::unique_ptr<Mesh> make_mesh(const std::function<std::string(int rank)>& name_of) override {
    auto mesh = std::make_unique<TcpMesh>();
    for (const hvl_connection& each : connections_) {
      if (each.use == HVL_DATA) add(each, name_of(each.rank), mesh.get());
    }
    return mesh;
  }

  std::unique_ptr<Mesh> make_message_stream(int rank, const std::string& peer,
                                            std::optional<MessageKeys>* keys) override {
    const hvl_connection& connection = find(HVL_MESSAGES, rank, peer);
    auto mesh = std::make_unique<TcpMesh>();
    add(connection, peer, mesh.get());
    if (seals_data_) return mesh;
    keys->emplace();
    std::memcpy((*keys)->send, connection.send_key, sizeof(*keys)->send);
    std::memcpy((*keys)->receive, connection.receive_key, sizeof(*keys)->receive);
    return mesh;
  }

 private:
  const hvl_connection& find(hvl_use use, int rank, const std::string& peer) const {
    for (const hvl_connection& each : connections_) {
      if (each.use == use && each.rank == rank) return each;
    }
    throw std::runtime_error("there is no connection to " + peer +
                             (use == HVL_CONTROL ? " for control" : " for messages"));
  }
  void add(const hvl_connection& connection, const std::string& peer, TcpMesh* mesh) const {
    std::unique_ptr<DataSeal> seal;
    if (seals_data_) seal = std::make_unique<DataSeal>(connection.send_key, connection.receive_key, peer);
    mesh->add(connection.rank, duplicate(connection.fd), peer, std::move(seal));
  }

  const std::vector<hvl_connection> connections_;
  const bool seals_data_;
};

}  // namespace

void TcpMesh::add(int rank, int fd, const std::string& peer, std::unique_ptr<DataSeal> seal) {
  const size_t index = static_cast<size_t>(rank);
  if (index >= streams_.size()) streams_.resize(index + 1);
  streams_[index].push_back(std::make_unique<Stream>(fd, peer, std::move(seal)));
}

void TcpMesh::close_in_child() {
  for (const auto& streams : streams_) {
    for (const auto& stream : streams) stream->close();
  }
}

Status TcpMesh::progress(bool* moved) {
  Status status;
  for (Stream* stream : active_) {
    status = stream->progress(moved);
    if (!status.ok()) return status;
  }
  const auto is_idle = [](const Stream* stream) { return stream->is_idle(); };
  active_.erase(std::remove_if(active_.begin(), active_.end(), is_idle), active_.end());
  return status;
}

void TcpMesh::add_to(std::vector<pollfd>* polled) const {
  for (const Stream* stream : active_) polled->push_back(stream->polled());
}

std::string TcpMesh::awaited() const {
  const auto receives = [](const Stream* stream) { return stream->is_receiving(); };
  // A peer that only does not read is most often waiting for others, as this rank is.
  const bool any_receives = std::any_of(active_.begin(), active_.end(), receives);
  std::set<std::string> peers;
  for (const Stream* stream : active_) {
    if (receives(stream) || !any_receives) peers.insert(stream->peer());
  }
  std::string text;
  for (const std::string& peer : peers) text += (text.empty() ? "" : ", ") + peer;
  return text;
}

Status TcpMesh::check_answered() const {
  Status status;
  for (const Stream* stream : active_) {
    if (status.ok()) status = stream->check_answered();
  }
  return status;
}

std::shared_ptr<Transport> make_tcp_transport(std::vector<hvl_connection> connections, bool seals_data) {
  return std::make_shared<TcpTransport>(std::move(connections), seals_data);
}

}  // namespace hvl
