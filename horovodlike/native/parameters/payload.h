// The formats in which the elements of a push may be sent: as they are, or as numbers of fewer bits.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "hvl_parameters.h"

namespace hvl {

using Payload = hvl_payload;

// HVL_PAYLOAD_INT8: as many elements have a scale, a float32. The scales of all elements come first.
constexpr uint64_t kScaledElements = 1024;

// The bytes of `count` elements of an array of `dtype`.
uint64_t num_bytes_of(Payload payload, DataType dtype, uint64_t count);

// Converts elements of float32 or float64 to another payload than HVL_PAYLOAD_FULL. `residual`: null, or the errors of
// earlier conversions of these elements: they are added, and replaced by the new errors.
void narrow(Payload payload, DataType dtype, const char* elements, uint64_t count, char* residual, char* narrowed);
void widen(Payload payload, DataType dtype, const char* narrowed, uint64_t count, char* elements);

}  // namespace hvl
