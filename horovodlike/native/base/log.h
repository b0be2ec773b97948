// Log lines of the engine, to standard error.
#pragma once

#include <unistd.h>

#include <atomic>
#include <string>

namespace hvl {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

inline std::atomic<int> log_threshold{static_cast<int>(LogLevel::kWarning)};

inline void set_log_level(LogLevel level) { log_threshold.store(static_cast<int>(level)); }

inline bool is_logged(LogLevel level) {
  return static_cast<int>(level) >= log_threshold.load(std::memory_order_relaxed);
}

// Writes a line with one system call. Thread-safe. Ignores an error: there is nowhere to report it.
inline void write_line(const std::string& line) {
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

inline void log(LogLevel level, const std::string& text) {
  constexpr const char* kNames[] = {"trace", "debug", "info", "warning", "error", "fatal"};
  if (!is_logged(level)) return;
  write_line(std::string("horovodlike ") + kNames[static_cast<int>(level)] + ": " + text + "\n");
}

// Writes output that the user has asked for. It has no level, so it is always written.
inline void tell(const std::string& text) { write_line("horovodlike: " + text + "\n"); }

}  // namespace hvl
