#include "base/log.h"

#include <unistd.h>

#include <atomic>

namespace hvl {

namespace {
std::atomic<int> threshold{static_cast<int>(LogLevel::kWarning)};
}

void set_log_level(LogLevel level) { threshold.store(static_cast<int>(level)); }

bool is_logged(LogLevel level) { return static_cast<int>(level) >= threshold.load(std::memory_order_relaxed); }

namespace {

// There is nowhere to report that standard error cannot be written.
void write_line(const std::string& line) {
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

}  // namespace

void log(LogLevel level, const std::string& text) {
  constexpr const char* kNames[] = {"trace", "debug", "info", "warning", "error", "fatal"};
  if (!is_logged(level)) return;
  write_line(std::string("horovodlike ") + kNames[static_cast<int>(level)] + ": " + text + "\n");
}

void tell(const std::string& text) { write_line("horovodlike: " + text + "\n"); }

}  // namespace hvl
