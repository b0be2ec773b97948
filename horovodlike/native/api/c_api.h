// Shared by the functions of hvl.h: the running engine, the handles, and the report of errors.
#pragma once

#include <exception>
#include <memory>

#include "engine/engine.h"

namespace hvl {

// The functions of this file may be called by any thread.

// The running engine; null if there is none.
std::shared_ptr<Engine> engine();
// True if this process was forked from one with a running engine, and has not started its own.
bool is_forked_child();
HandleTable& handle_table();

// Keeps the message of an error for hvl_last_error(), and returns the code.
int32_t report(const Status& status);
// The error for a call without an engine, with the reason.
Status not_initialized();

// Calls a function that returns a Status, and reports it. An exception becomes a Status: none crosses the C API.
template <typename Function>
int32_t guarded(Function&& function) {
  try {
    return report(function());
  } catch (const std::exception& error) {
    return report(Status(HVL_RESOURCES, error.what()));
  }
}

}  // namespace hvl
