// The wire format of the control plane: messages from ranks to the coordinator, and the records of its log.
//
// Fixed little-endian binary. A decoder never trusts a length or an enumeration: bad input is an error, never a read
// past the end, a large allocation or an exception.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "negotiate/rank_set.h"
#include "negotiate/signature.h"

namespace hvl {

// Assigned by the coordinator, never 0. Not reused for another name before 2^31 others were assigned, so messages still
// under way cannot be confused.
using TensorId = uint32_t;

constexpr int kMaxDimensions = 8;
constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxGroup = 65536;
constexpr int32_t kMaxRanks = 65536;

// Rank to coordinator. An aggregator merges messages of several ranks into one.
struct Message {
  enum class Type : uint8_t {
    kReady = 1,     // `ids`: tensors whose signature the log has defined and that this rank has ready
    kRequest = 2,   // `signature`: a ready tensor that has no id, or differs from the definition of its id
    kShutdown = 3,  // `text`: why
  };
  Type type = Type::kReady;
  std::vector<TensorId> ids;
  Signature signature;
  std::string text;

  // The ranks of the message, if it is not for the sender alone. The clocks of hosts differ, so times are sent as ages:
  // the receiver subtracts them from the time of arrival.
  RankSet ranks;        // empty: the sender alone, and the members below have no meaning
  int32_t latest = -1;  // the rank of `ranks` that was ready last
  uint64_t age = 0;     // nanoseconds from then to the sending of the message
  uint64_t spread = 0;  // nanoseconds between the first of `ranks` being ready and the last
  // For kRequest: the varying values, rank after rank of `ranks`, the same count for each; they have been taken out of
  // `signature`, see take_varying(). Empty: all ranks requested `signature` as it is.
  std::vector<int64_t> varying;

  // Makes the message of a single rank name that rank.
  void speak_for(int rank, uint64_t nanoseconds_since) {
    ranks.clear();
    ranks.add(rank);
    latest = rank;
    age = nanoseconds_since;
  }
};

// Returns a protocol error: the rank's message is invalid, and the job is broken.
Status protocol_error(int rank, const std::string& what);

// Coordinator to all ranks: one record of the log.
struct Record {
  enum class Type : uint8_t {
    kDefine = 1,    // from now on `id` means `signature`; `varying`, `replaces`: see below
    kExecute = 2,   // run `ids` as one batch: all members of their process set, except those in `absent`
    kError = 3,     // the request `signature.name` on `signature.process_set` failed with `status` and `text`, on all
                    // ranks except those in `absent`
    kEvict = 4,     // `ids` are no longer defined
    kShutdown = 5,  // the job ends; `status` is HVL_SHUT_DOWN or HVL_JOB_BROKEN, `text` says why
  };
  Type type = Type::kExecute;
  TensorId id = 0;
  Signature signature;
  // The varying values, rank after rank, the same count for each; see take_varying(). `signature` has the sum of all
  // ranks' dimensions 0. Zeros for ranks that take no part. Empty for kinds without varying values.
  std::vector<int64_t> varying;
  uint32_t varying_per_rank = 0;
  // Not 0: the tensor's previous id, which is no longer defined. An announcement by the previous id counts for `id`,
  // except from the `absent` ranks, which announce again.
  TensorId replaces = 0;
  std::vector<TensorId> ids;
  std::vector<int32_t> absent;  // ascending; ranks that have joined without these tensors
  int32_t last_joined = -1;     // if a join is executed: the rank that joined last
  hvl_status status = HVL_OK;
  std::string text;
};

// Appends to `out`. Values that decode() rejects (a longer name, more tensors or dimensions) must not be encoded. Only
// the members that belong to the type are written; decode() leaves the others as they are in a new object.
void encode(const Message& message, std::string* out);
void encode(const Record& record, std::string* out);

// `bytes` must hold exactly one message or record.
Status decode(const void* bytes, size_t num_bytes, Message* message);
Status decode(const void* bytes, size_t num_bytes, Record* record);

}  // namespace hvl
