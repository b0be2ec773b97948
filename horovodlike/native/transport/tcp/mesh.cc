#include "transport/tcp/mesh.h"

#include <algorithm>
#include <set>
#include <utility>

namespace hvl {

void Mesh::add(int rank, int fd, const std::string& peer, std::unique_ptr<DataSeal> seal) {
  streams_[static_cast<size_t>(rank)].push_back(std::make_unique<Stream>(fd, peer, std::move(seal)));
}

void Mesh::close_in_child() {
  for (const auto& streams : streams_) {
    for (const auto& stream : streams) stream->close();
  }
}

Status Mesh::progress(bool* moved) {
  Status status;
  for (Stream* stream : active_) {
    status = stream->progress(moved);
    if (!status.ok()) return status;
  }
  const auto is_idle = [](const Stream* stream) { return stream->is_idle(); };
  active_.erase(std::remove_if(active_.begin(), active_.end(), is_idle), active_.end());
  return status;
}

void Mesh::add_to(std::vector<pollfd>* polled) const {
  for (const Stream* stream : active_) polled->push_back(stream->polled());
}

std::string Mesh::awaited() const {
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

Status Mesh::check_answered() const {
  Status status;
  for (const Stream* stream : active_) {
    if (status.ok()) status = stream->check_answered();
  }
  return status;
}

}  // namespace hvl
