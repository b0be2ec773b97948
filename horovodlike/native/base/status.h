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
  // The error that the connection to a peer is lost, most often because the peer has ended. It breaks the job if the
  // connection is still needed.
  static Status lost(std::string message) {
    Status status(HVL_JOB_BROKEN, std::move(message));
    status.is_lost_ = true;
    return status;
  }

  bool ok() const { return code_ == HVL_OK; }
  hvl_status code() const { return code_; }
  const std::string& message() const { return message_; }
  bool is_lost() const { return is_lost_; }

 private:
  hvl_status code_ = HVL_OK;
  bool is_lost_ = false;
  std::string message_;
};

}  // namespace hvl
