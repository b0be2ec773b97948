// Log lines of the engine, to standard error.
#pragma once

#include <string>

namespace hvl {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

void set_log_level(LogLevel level);
bool is_logged(LogLevel level);
// Thread-safe; one line, written at once.
void log(LogLevel level, const std::string& text);
// The same for output that the user has asked for: it has no level.
void tell(const std::string& text);

}  // namespace hvl
