// How threads wait for results that a GPU has yet to finish.
#pragma once

#include <cstddef>
#include <cstdint>

#include "queue/handle_table.h"

namespace hvl {

// Any thread. The handles are complete or unknown. Waits on the host until the GPU has done their work, or has
// failed, or the job is broken: HVL_OK. HVL_IN_PROGRESS: not until the deadline (now_ns() time) or a signal. If it has
// failed, an engine gets some time to say it first.
hvl_status wait_for_results(HandleTable* table, const int64_t* handles, size_t count, uint64_t deadline,
                            bool has_engine = true);

// The same, but a stream waits for it in place of the host. HVL_INVALID_ARGUMENT: the stream is being captured. If
// it cannot be made to wait, the host waits, so that the memory is not in use after any other error either.
Status hold_up_for_results(HandleTable* table, const int64_t* handles, size_t count, CudaStream stream,
                           uint64_t deadline, bool has_engine = true);

}  // namespace hvl
