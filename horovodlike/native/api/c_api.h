// The common ground of the functions of hvl.h: the engine that runs, the handles, and how they report errors.
#pragma once

#include <exception>
#include <memory>

#include "engine/engine.h"

namespace hvl {

// The functions of this file may be called by any thread.

// Null: none runs.
std::shared_ptr<Engine> engine();
// This process was forked from one in which an engine ran, and has none of its own.
bool is_forked_child();
HandleTable& handle_table();

// Keeps the message for hvl_last_error().
int32_t report(const Status& status);
// There is no engine, and why.
Status not_initialized();

// Calls a function that returns a Status; an exception becomes one, too: none crosses the C API.
template <typename Function>
int32_t guarded(Function&& function) {
  try {
    return report(function());
  } catch (const std::exception& error) {
    return report(Status(HVL_RESOURCES, error.what()));
  }
}

}  // namespace hvl
