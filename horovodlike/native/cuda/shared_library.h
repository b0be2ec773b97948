// A shared library that is opened when it is first needed: none of its headers is known at build time.
#pragma once

#include <string>

#include "base/status.h"

namespace hvl {

// Stays open as long as the process lives: what it has started may outlive every engine.
class SharedLibrary {
 public:
  // `file`: a path, or a name for the loader to look for. HVL_RESOURCES: it cannot be opened, and why.
  static Status open(const std::string& file, SharedLibrary* library);

  // Points `*function` to the symbol. HVL_RESOURCES: there is none of this name.
  template <typename Function>
  Status find(const char* symbol, Function** function) const {
    void* address = nullptr;
    Status status = find_address(symbol, &address);
    *function = reinterpret_cast<Function*>(address);
    return status;
  }

 private:
  Status find_address(const char* symbol, void** address) const;

  std::string file_;
  void* handle_ = nullptr;
};

}  // namespace hvl
