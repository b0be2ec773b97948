// The wire format of the control plane: what ranks tell the coordinator, and the records of its log.
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

// Given by the coordinator, never 0. Not used again for another name before 2^31 others were given, so nothing that is
// still under way can be confused.
using TensorId = uint32_t;

constexpr int kMaxDimensions = 8;
constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxGroup = 65536;
constexpr int32_t kMaxRanks = 65536;

// Rank to coordinator; also of several ranks together, where somebody between them and the coordinator speaks for them.
struct Message {
  enum class Type : uint8_t {
    kReady = 1,     // `ids`: tensors whose signature the log has defined and that this rank has ready
    kRequest = 2,   // `signature`: ready, and not known by an id or different from what the id stands for
    kShutdown = 3,  // `text`: why
  };
  Type type = Type::kReady;
  std::vector<TensorId> ids;
  Signature signature;
  std::string text;

  // For whom it speaks, not only the sender for itself. The clocks of hosts differ, so times are on the way as ages:
  // who receives it subtracts them from when it came.
  RankSet ranks;        // empty: the sender alone, and what follows has no meaning
  int32_t latest = -1;  // the one of `ranks` that was ready last
  uint64_t age = 0;     // nanoseconds since that one was ready, when the message was sent
  uint64_t spread = 0;  // nanoseconds between the first of `ranks` being ready and the last
  // Of kRequest. What varies, rank after rank of `ranks`, as many numbers for each: see take_varying(), which has been
  // done to `signature` then. Empty: all have asked for `signature` as it is.
  std::vector<int64_t> varying;

  // Makes the message of a rank alone one that says so.
  void speak_for(int rank, uint64_t nanoseconds_since) {
    ranks.clear();
    ranks.add(rank);
    latest = rank;
    age = nanoseconds_since;
  }
};

// That a rank has sent what no correct one sends: the job is broken.
Status protocol_error(int rank, const std::string& what);

// Coordinator to all ranks: one record of the log.
struct Record {
  enum class Type : uint8_t {
    kDefine = 1,    // from now on `id` stands for `signature`; `varying`, `replaces`: see below
    kExecute = 2,   // run `ids` as one batch, of the members of their process set but for those `absent`
    kError = 3,     // the request `signature.name` of `signature.process_set` failed with `status` and `text`, but for
                    // those of ranks that are `absent`
    kEvict = 4,     // `ids` stand for nothing any more
    kShutdown = 5,  // the job ends; `status` is HVL_SHUT_DOWN or HVL_JOB_BROKEN, `text` says why
  };
  Type type = Type::kExecute;
  TensorId id = 0;
  Signature signature;
  // What varies, rank after rank, as many numbers for each; see take_varying(). `signature` has the sum of all ranks'
  // dimensions 0. Zeros for ranks that take no part. Empty for kinds where nothing varies.
  std::vector<int64_t> varying;
  uint32_t varying_per_rank = 0;
  // Not 0: this id was the tensor's and stands for nothing any more. Who announced by it has announced `id`; but for
  // ranks that are `absent`, which announce again.
  TensorId replaces = 0;
  std::vector<TensorId> ids;
  std::vector<int32_t> absent;  // ascending; ranks that have joined without these tensors
  int32_t last_joined = -1;     // if a join is executed: the rank that joined last
  hvl_status status = HVL_OK;
  std::string text;
};

// Appends to `out`. What decode() would refuse (a longer name, more tensors or dimensions) must not be encoded. Only
// the members that belong to the type are written; decode() leaves the others as they are in a new object.
void encode(const Message& message, std::string* out);
void encode(const Record& record, std::string* out);

// `bytes` must hold exactly one message or record.
Status decode(const void* bytes, size_t num_bytes, Message* message);
Status decode(const void* bytes, size_t num_bytes, Record* record);

}  // namespace hvl
