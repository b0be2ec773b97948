// NCCL's functions, by the names that libnccl.so.2 exports.

#include <algorithm>
#include <cstring>

#include "fake_gpu.h"
#include "machine.h"
#include "nccl/nccl_api.h"
#include "reduce.h"

#pragma GCC visibility push(default)

namespace fake_gpu {

namespace {

struct Comm;

enum class Function { kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kSend, kRecv };

struct Call {
  Function function;
  const char* from;
  char* to;
  size_t count;
  int dtype;
  int op;
  int peer;  // or root

  bool is_between_two() const { return function == Function::kSend || function == Function::kRecv; }
  bool agrees(const Call& other) const {
    return function == other.function && count == other.count && dtype == other.dtype && peer == other.peer &&
           (op == other.op || op > hvl::kNcclAvg);  // made operations have other numbers on each rank
  }
};

// Those who have the same id.
struct Clique {
  std::vector<Comm*> members;  // by rank; null: not yet, or not any more
  int num_joined = 0;
};

struct Comm {
  std::shared_ptr<Clique> clique;
  Gpu* gpu = nullptr;
  int rank = 0;
  int size = 0;
  int polls = 0;  // that say kNcclInProgress
  bool is_finalized = false;
  std::map<int, std::pair<int, double>> scaled;  // by operation: dtype and factor
  int next_op = 512;
};

// The work that one communicator has given to its stream at once.
struct Launch {
  Comm* comm;
  Stream* stream;
  std::vector<Call> calls;
};

std::map<uint64_t, std::shared_ptr<Clique>> cliques;  // by id; guarded by the machine's mutex
std::set<Comm*> comms;                                // likewise
uint64_t num_ids = 0;                                 // likewise

thread_local int group_depth = 0;
thread_local std::vector<Launch> group;

bool is_complete(const Comm& comm) { return comm.clique->num_joined == comm.size; }

bool is_in_progress(const Comm& comm) { return !is_complete(comm) || comm.polls > 0; }

void check_ready(const char* name, const Comm& comm) {
  if (!is_in_progress(comm)) return;
  Machine::get().violate(std::string(name) + " was called before the communicator was ready");
}

// With the machine locked, for a call that uses a communicator.
template <typename Run>
int with_comm(const char* name, void* handle, const std::string& numbers, Run&& run) {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  auto* comm = static_cast<Comm*>(handle);
  if (comms.count(comm) == 0) {
    machine.violate(std::string(name) + " was called with a communicator that does not exist");
    return hvl::kNcclInvalidArgument;
  }
  if (current_gpu(name) != comm->gpu) machine.violate(std::string(name) + " was called with another GPU's context");
  const int failure = machine.call(comm->gpu, name, numbers);
  return failure != 0 ? failure : run(machine, comm);
}

int add(const char* name, void* handle, void* stream, const Call& call) {
  std::string numbers = " count=" + std::to_string(call.count) + " dtype=" + std::to_string(call.dtype);
  const bool reduces = call.function == Function::kAllReduce || call.function == Function::kReduce ||
                       call.function == Function::kReduceScatter;
  if (reduces) numbers += " op=" + (call.op > hvl::kNcclAvg ? "scaled" : std::to_string(call.op));
  if (call.peer >= 0) numbers += " peer=" + std::to_string(call.peer);
  return with_comm(name, handle, numbers, [&](Machine& machine, Comm* comm) -> int {
    if (group_depth == 0) machine.violate(std::string(name) + " is not in a group: it would be a launch of its own");
    check_ready(name, *comm);
    if (reduces && call.op > hvl::kNcclAvg) {
      const auto scaled = comm->scaled.find(call.op);
      if (scaled == comm->scaled.end() || scaled->second.first != call.dtype) {
        machine.violate(std::string(name) + " has an operation of another communicator or dtype");
        return hvl::kNcclInvalidArgument;
      }
    }
    auto* given = static_cast<Stream*>(stream);
    if (given == nullptr || given->gpu != comm->gpu) machine.violate(std::string(name) + " has another GPU's stream");
    if (group.empty() || group.back().comm != comm || group.back().stream != given) group.push_back({comm, given, {}});
    group.back().calls.push_back(call);
    return hvl::kNcclSuccess;
  });
}

size_t bytes_touched(const Call& call, const Comm& comm, bool received) {
  const size_t num_bytes = call.count * bytes_of(call.dtype);
  const auto ranks = static_cast<size_t>(comm.size);
  if (call.function == Function::kReduceScatter && !received) return num_bytes * ranks;
  if (call.function == Function::kAllGather && received) return num_bytes * ranks;
  return num_bytes;
}

Launch* front_of(Comm* comm, Stream* stream) {
  if (comm == nullptr || stream->queue.empty() || stream->queue.front().owner != comm) return nullptr;
  return static_cast<Launch*>(stream->queue.front().details);
}

// The launch at the front of the member's stream, if it belongs to this clique.
Launch* launch_of(Comm* comm) {
  for (Stream* stream : Machine::get().streams) {
    if (stream->is_held) continue;
    if (Launch* launch = front_of(comm, stream)) return launch;
  }
  return nullptr;
}

void move(char* to, const void* from, size_t num_bytes) {
  if (to != from && num_bytes > 0) memmove(to, from, num_bytes);
}

// The i-th call of all members.
void run_call(const std::vector<Launch*>& launches, size_t i) {
  const Call& first = launches[0]->calls[i];
  const size_t num_bytes = first.count * bytes_of(first.dtype);
  const auto call_of = [&](size_t member) -> const Call& { return launches[member]->calls[i]; };
  const auto result_at = [&](size_t offset) {
    std::vector<const char*> sources;
    for (size_t member = 0; member < launches.size(); ++member) sources.push_back(call_of(member).from + offset);
    const Comm& comm = *launches[0]->comm;
    const bool scaled = first.op > hvl::kNcclAvg;
    std::vector<char> result(num_bytes);
    reduce(first.dtype, scaled ? static_cast<int>(hvl::kNcclSum) : first.op,
           scaled ? comm.scaled.at(first.op).second : 1.0, sources, result.data(), first.count);
    return result;
  };
  const auto peer = static_cast<size_t>(first.peer);
  std::vector<std::vector<char>> results;  // of each member, before any output is written
  for (size_t member = 0; member < launches.size(); ++member) {
    switch (first.function) {
      case Function::kAllReduce: results.push_back(result_at(0)); break;
      case Function::kReduce: results.push_back(member == peer ? result_at(0) : std::vector<char>()); break;
      case Function::kReduceScatter: results.push_back(result_at(member * num_bytes)); break;
      case Function::kBroadcast: results.emplace_back(call_of(peer).from, call_of(peer).from + num_bytes); break;
      default:
        results.emplace_back();
        for (size_t from = 0; from < launches.size(); ++from) {
          results.back().insert(results.back().end(), call_of(from).from, call_of(from).from + num_bytes);
        }
    }
  }
  for (size_t member = 0; member < launches.size(); ++member) {
    move(call_of(member).to, results[member].data(), results[member].size());
  }
}

void take(const std::vector<Launch*>& launches) {
  for (Launch* launch : launches) {
    Stream* stream = launch->stream;
    stream->queue.pop_front();
    delete launch;
  }
}

bool run_collectives(Launch* launch) {
  std::vector<Launch*> launches;
  for (Comm* member : launch->comm->clique->members) {
    launches.push_back(launch_of(member));
    if (launches.back() == nullptr) return false;
  }
  for (Launch* other : launches) {
    bool agrees = other->calls.size() == launch->calls.size();
    for (size_t i = 0; agrees && i < launch->calls.size(); ++i) agrees = other->calls[i].agrees(launch->calls[i]);
    if (agrees) continue;
    Machine::get().violate("ranks have called different collectives of one communicator: the device hangs");
    take(launches);
    return true;
  }
  for (size_t i = 0; i < launch->calls.size(); ++i) run_call(launches, i);
  take(launches);
  return true;
}

// Sends and receives need those only with whom they are.
bool run_pairs(Launch* launch) {
  std::vector<Launch*> launches(launch->comm->clique->members.size());
  std::vector<size_t> to_visit = {static_cast<size_t>(launch->comm->rank)};
  while (!to_visit.empty()) {
    const size_t member = to_visit.back();
    to_visit.pop_back();
    if (launches[member] != nullptr) continue;
    launches[member] = launch_of(launch->comm->clique->members[member]);
    if (launches[member] == nullptr) return false;
    for (const Call& call : launches[member]->calls) to_visit.push_back(static_cast<size_t>(call.peer));
  }
  std::map<std::pair<int, int>, std::deque<const Call*>> sent;  // by sender and receiver
  for (const Launch* each : launches) {
    if (each == nullptr) continue;
    for (const Call& call : each->calls) {
      if (call.function == Function::kSend) sent[{each->comm->rank, call.peer}].push_back(&call);
    }
  }
  std::vector<Launch*> taken;
  for (Launch* each : launches) {
    if (each == nullptr) continue;
    taken.push_back(each);
    for (const Call& call : each->calls) {
      if (call.function != Function::kRecv) continue;
      auto& from_peer = sent[{call.peer, each->comm->rank}];
      if (from_peer.empty() || from_peer.front()->count != call.count) {
        Machine::get().violate("a rank receives what no other one sends: the device hangs");
        continue;
      }
      move(call.to, from_peer.front()->from, call.count * bytes_of(call.dtype));
      from_peer.pop_front();
    }
  }
  for (const auto& [pair, left] : sent) {
    if (!left.empty()) Machine::get().violate("a rank sends what no other one receives: the device hangs");
  }
  take(taken);
  return true;
}

void give(const Launch& given) {
  auto* launch = new Launch(given);
  Work work;
  work.owner = given.comm;
  work.details = launch;
  bool has_pairs = false;
  bool has_others = false;
  for (const Call& call : given.calls) {
    (call.is_between_two() ? has_pairs : has_others) = true;
    if (call.from != nullptr) work.touched.push_back({call.from, bytes_touched(call, *given.comm, false)});
    if (call.to != nullptr) work.touched.push_back({call.to, bytes_touched(call, *given.comm, true)});
  }
  if (has_pairs && has_others) Machine::get().violate("a group has both collectives and sends");
  work.run = [launch, has_pairs] { return has_pairs ? run_pairs(launch) : run_collectives(launch); };
  Machine::get().give(given.stream, std::move(work));
}

// Drops the work that the communicator has given to streams.
int drop(Comm* comm) {
  int dropped = 0;
  for (Stream* stream : Machine::get().streams) {
    auto& queue = stream->queue;
    for (auto work = queue.begin(); work != queue.end();) {
      if (work->owner != comm) {
        ++work;
        continue;
      }
      delete static_cast<Launch*>(work->details);
      work = queue.erase(work);
      ++dropped;
    }
  }
  for (Comm*& member : comm->clique->members) {
    if (member == comm) member = nullptr;
  }
  comms.erase(comm);
  delete comm;
  Machine::get().wake();
  return dropped;
}

// As the driver does, it waits for what the device is at: also that of other communicators.
void free_memory(Gpu* gpu) {
  Machine& machine = Machine::get();
  std::unique_lock<std::mutex> lock(machine.mutex);
  const bool is_idle = machine.wait(&lock, [&] {
    return std::none_of(machine.streams.begin(), machine.streams.end(), [&](const Stream* stream) {
      return stream->gpu == gpu && !stream->queue.empty() && stream->queue.front().owner != nullptr;
    });
  });
  if (!is_idle) machine.violate("a communicator cannot be freed, since another one is running");
}

}  // namespace

int num_communicators() {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  return static_cast<int>(comms.size());
}

extern "C" {

int ncclGetVersion(int* version) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  *version = Machine::get().nccl_version;
  return 0;
}

int ncclGetUniqueId(hvl::NcclUniqueId* id) {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  Gpu* gpu = current_gpu("ncclGetUniqueId");
  const int failure = gpu != nullptr ? machine.call(gpu, "ncclGetUniqueId") : 1;
  if (failure != 0) return failure;
  memset(id, 0, sizeof *id);
  machine.unused_ids.insert(++num_ids);
  memcpy(id->internal, &num_ids, sizeof num_ids);
  return 0;
}

const char* ncclGetErrorString(int error) {
  if (error == hvl::kNcclRemoteError) return "remote process exited or there was a network error";
  return error == hvl::kNcclUnhandledCudaError ? "unhandled cuda error" : "an error of the double";
}

const char* ncclGetLastError(void*) { return "as the test wants it"; }

int ncclCommInitRankConfig(void** made, int size, hvl::NcclUniqueId id, int rank, hvl::NcclConfig* config) {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  Gpu* gpu = current_gpu("ncclCommInitRankConfig");
  if (gpu == nullptr) return hvl::kNcclUnhandledCudaError;
  const std::string numbers = " size=" + std::to_string(size) + " rank=" + std::to_string(rank);
  const int failure = machine.call(gpu, "ncclCommInitRankConfig", numbers);
  if (failure != 0) return failure;
  if (config->size != 24 || config->magic != 0xcafebeef || config->version != 21400 || config->blocking != 0) {
    machine.violate("the configuration of a communicator is not that of NCCL 2.14, or it blocks");
  }
  uint64_t number = 0;
  memcpy(&number, id.internal, sizeof number);
  machine.unused_ids.erase(number);
  std::shared_ptr<Clique>& clique = cliques[number];
  if (clique == nullptr) clique = std::make_shared<Clique>();
  clique->members.resize(static_cast<size_t>(size));
  auto* comm = new Comm;
  comm->clique = clique;
  comm->gpu = gpu;
  comm->rank = rank;
  comm->size = size;
  comm->polls = machine.polls;
  for (const Comm* member : clique->members) {
    if (member != nullptr && member->gpu->uuid == gpu->uuid) machine.violate("two ranks of a communicator share a GPU");
  }
  if (clique->members.at(static_cast<size_t>(rank)) != nullptr) machine.violate("two ranks have the same number");
  clique->members[static_cast<size_t>(rank)] = comm;
  ++clique->num_joined;
  comms.insert(comm);
  *made = comm;
  return hvl::kNcclInProgress;
}

int ncclCommGetAsyncError(void* handle, int* state) {
  return with_comm("ncclCommGetAsyncError", handle, "", [&](Machine&, Comm* comm) -> int {
    *state = comm->gpu->async_error;
    if (*state == 0 && is_in_progress(*comm)) *state = hvl::kNcclInProgress;
    if (is_complete(*comm) && comm->polls > 0) --comm->polls;
    return 0;
  });
}

int ncclCommFinalize(void* handle) {
  return with_comm("ncclCommFinalize", handle, "", [&](Machine& machine, Comm* comm) -> int {
    check_ready("ncclCommFinalize", *comm);
    for (const Stream* stream : machine.streams) {
      for (const Work& work : stream->queue) {
        if (work.owner == comm) machine.violate("a communicator is finalized in use");
      }
    }
    if (!comm->scaled.empty()) machine.violate("a communicator is finalized with operations left");
    comm->is_finalized = true;
    comm->polls = machine.polls;
    return hvl::kNcclInProgress;
  });
}

int ncclCommDestroy(void* handle) {
  return with_comm("ncclCommDestroy", handle, "", [&](Machine& machine, Comm* comm) -> int {
    if (!comm->is_finalized || comm->polls > 0) machine.violate("a communicator is destroyed that is not finalized");
    drop(comm);
    return 0;
  });
}

int ncclCommAbort(void* handle) {
  Gpu* gpu = nullptr;
  const int result = with_comm("ncclCommAbort", handle, "", [&](Machine&, Comm* comm) -> int {
    gpu = comm->gpu;
    drop(comm);
    return 0;
  });
  if (gpu != nullptr) free_memory(gpu);
  return result;
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, void* handle) {
  return with_comm("ncclRedOpCreatePreMulSum", handle, "", [&](Machine& machine, Comm* comm) -> int {
    check_ready("ncclRedOpCreatePreMulSum", *comm);
    if (group_depth != 0 || residence != hvl::kNcclScalarHostImmediate) {
      machine.violate("an operation is made within a group, or with a factor on the device");
    }
    float single = 0;
    double factor = 0;
    uint16_t half = 0;
    memcpy(&single, scalar, sizeof single);
    memcpy(&half, scalar, sizeof half);
    if (dtype == hvl::kNcclFloat64) memcpy(&factor, scalar, sizeof factor);
    if (dtype == hvl::kNcclFloat32) factor = single;
    if (dtype == hvl::kNcclFloat16) factor = hvl::widen(hvl::Float16{half});
    if (dtype == hvl::kNcclBfloat16) factor = hvl::widen(hvl::Bfloat16{half});
    *op = comm->next_op++;
    comm->scaled[*op] = {dtype, factor};
    return 0;
  });
}

int ncclRedOpDestroy(int op, void* handle) {
  return with_comm("ncclRedOpDestroy", handle, "", [&](Machine& machine, Comm* comm) -> int {
    if (comm->scaled.erase(op) == 0) machine.violate("an operation is destroyed that does not exist");
    return 0;
  });
}

int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, void* comm, void* stream) {
  return add("ncclAllReduce", comm, stream,
             {Function::kAllReduce, static_cast<const char*>(from), static_cast<char*>(to), count, dtype, op, -1});
}

int ncclReduce(const void* from, void* to, size_t count, int dtype, int op, int root, void* comm, void* stream) {
  return add("ncclReduce", comm, stream,
             {Function::kReduce, static_cast<const char*>(from), static_cast<char*>(to), count, dtype, op, root});
}

int ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int op, void* comm, void* stream) {
  return add("ncclReduceScatter", comm, stream,
             {Function::kReduceScatter, static_cast<const char*>(from), static_cast<char*>(to), count, dtype, op, -1});
}

int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, void* comm, void* stream) {
  return add("ncclBroadcast", comm, stream,
             {Function::kBroadcast, static_cast<const char*>(from), static_cast<char*>(to), count, dtype, 0, root});
}

int ncclAllGather(const void* from, void* to, size_t count, int dtype, void* comm, void* stream) {
  return add("ncclAllGather", comm, stream,
             {Function::kAllGather, static_cast<const char*>(from), static_cast<char*>(to), count, dtype, 0, -1});
}

int ncclSend(const void* from, size_t count, int dtype, int peer, void* comm, void* stream) {
  return add("ncclSend", comm, stream,
             {Function::kSend, static_cast<const char*>(from), nullptr, count, dtype, 0, peer});
}

int ncclRecv(void* to, size_t count, int dtype, int peer, void* comm, void* stream) {
  return add("ncclRecv", comm, stream, {Function::kRecv, nullptr, static_cast<char*>(to), count, dtype, 0, peer});
}

int ncclGroupStart() {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  Gpu* gpu = current_gpu("ncclGroupStart");
  if (gpu != nullptr) Machine::get().call(gpu, "ncclGroupStart");
  if (group_depth++ != 0) Machine::get().violate("a group within a group");
  return 0;
}

int ncclGroupEnd() {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  Gpu* gpu = current_gpu("ncclGroupEnd");
  const int failure = gpu != nullptr ? machine.call(gpu, "ncclGroupEnd") : 0;
  if (--group_depth < 0) machine.violate("a group ends that has not begun");
  for (const Launch& launch : group) {
    if (failure != 0) continue;
    launch.comm->polls = machine.polls;
    give(launch);
  }
  const bool launched = !group.empty();
  group.clear();
  if (failure != 0) return failure;
  return launched && machine.polls > 0 ? hvl::kNcclInProgress : hvl::kNcclSuccess;
}

}  // extern "C"

}  // namespace fake_gpu

#pragma GCC visibility pop
