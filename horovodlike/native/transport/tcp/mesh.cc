#include "transport/tcp/mesh.h"

#include <algorithm>
#include <utility>

namespace hvl {

void Mesh::add(int rank, int fd, const std::string& peer) {
  streams_[static_cast<size_t>(rank)].push_back(std::make_unique<Stream>(fd, peer));
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
  std::string text;
  for (const Stream* stream : active_) {
    if (stream->is_receiving()) text += (text.empty() ? "" : ", ") + stream->peer();
  }
  return text;
}

}  // namespace hvl
