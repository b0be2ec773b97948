#include "cuda/shared_library.h"

#include <dlfcn.h>

namespace hvl {

Status SharedLibrary::open(const std::string& file, SharedLibrary* library) {
  library->file_ = file;
  library->handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library->handle_ != nullptr) return Status();
  const char* why = dlerror();
  return Status(HVL_RESOURCES, file + " cannot be opened" + (why != nullptr ? std::string(": ") + why : ""));
}

Status SharedLibrary::find_address(const char* symbol, void** address) const {
  *address = dlsym(handle_, symbol);
  if (*address != nullptr) return Status();
  return Status(HVL_RESOURCES, file_ + " has no function " + symbol + ": it is too old, or another library");
}

}  // namespace hvl
