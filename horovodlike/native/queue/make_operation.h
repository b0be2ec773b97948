// From a request of the C API to an operation.
#pragma once

#include <memory>

#include "base/status.h"
#include "hvl.h"
#include "queue/operation.h"

namespace hvl {

// Checks what can be checked without a job, and copies what the request points to.
Status make_operation(const hvl_request& request, std::shared_ptr<Operation>* operation);

}  // namespace hvl
