#include "observe/fault_injection.h"

#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace hvl {

namespace {

bool is_tcp(int fd) {
  int type = 0;
  int domain = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) return false;
  length = sizeof domain;
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) return false;
  return domain == AF_INET || domain == AF_INET6;
}

}  // namespace

FaultAction make_trigger(hvl_fault fault, double amount) {
  switch (fault) {
    case HVL_FAULT_RAISE: return [] { throw std::runtime_error("a fault was injected (horovodlike.testing)"); };
    case HVL_FAULT_SIGNAL: return [amount] { kill(getpid(), static_cast<int>(amount)); };
    case HVL_FAULT_CLOSE: return cut_connections;
    case HVL_FAULT_SLOW: return [amount] { std::this_thread::sleep_for(std::chrono::duration<double>(amount)); };
  }
  return nullptr;
}

void cut_connections() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) throw std::runtime_error("cannot read /proc/self/fd, which lists the connections to cut");
  while (const dirent* entry = readdir(folder)) {
    const int fd = atoi(entry->d_name);  // 0 for "." and "..": never a socket of the job
    if (fd > 0 && is_tcp(fd)) shutdown(fd, SHUT_RDWR);
  }
  closedir(folder);
}

}  // namespace hvl
