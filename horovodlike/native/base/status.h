// Status: an error as a value. Crosses threads and the C API; exceptions do not.
#pragma once

#include <string>
#include <utility>

#include "hvl.h"

namespace hvl {

class Status {
 public:
  Status() = default;
  Status(hvl_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == HVL_OK; }
  hvl_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  hvl_status code_ = HVL_OK;
  std::string message_;
};

}  // namespace hvl
