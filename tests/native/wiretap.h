// An attacker on a connection of a job whose ranks are threads.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "connections.h"

namespace hvl {

// Passes on what each end sends to the other. `change` gets each byte that goes to the second end (rank 1) and how many
// came before it.
class Wiretap {
 public:
  using Change = std::function<char(uint64_t position, char byte)>;

  explicit Wiretap(Change change) : change_(std::move(change)) {}
  ~Wiretap() {
    for (std::thread& thread : threads_) thread.join();
    for (int fd : {inner_[0], inner_[1]}) close(fd);
  }
  Wiretap(const Wiretap&) = delete;
  Wiretap& operator=(const Wiretap&) = delete;

  // For one connection.
  void make_ends(int* ends) {
    for (int side : {0, 1}) {
      int pair[2];
      make_pair_of_ends(pair);
      ends[side] = pair[0];
      inner_[side] = pair[1];
      REQUIRE(fcntl(pair[1], F_SETFL, 0) == 0);  // it blocks
    }
    threads_.emplace_back([this] { pass_on(inner_[0], inner_[1], change_); });
    threads_.emplace_back([this] { pass_on(inner_[1], inner_[0], nullptr); });
  }

 private:
  static void pass_on(int from, int to, const Change& change) {
    std::vector<char> bytes(1 << 16);
    uint64_t position = 0;
    for (ssize_t count; (count = recv(from, bytes.data(), bytes.size(), 0)) > 0;) {
      for (ssize_t i = 0; i < count && change != nullptr; ++i) {
        bytes[static_cast<size_t>(i)] = change(position++, bytes[static_cast<size_t>(i)]);
      }
      for (ssize_t sent = 0; sent < count;) {
        const ssize_t part = send(to, bytes.data() + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
        if (part <= 0) break;
        sent += part;
      }
    }
    shutdown(from, SHUT_RDWR);
    shutdown(to, SHUT_RDWR);
  }

  const Change change_;
  int inner_[2] = {-1, -1};
  std::vector<std::thread> threads_;
};

}  // namespace hvl
