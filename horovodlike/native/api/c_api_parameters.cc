// The functions of hvl_parameters.h.

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "api/c_api.h"
#include "hvl_parameters.h"
#include "parameters/client_array.h"
#include "parameters/node.h"
#include "transport/tcp/tcp_transport.h"

struct hvl_parameters_array {
  std::unique_ptr<hvl::ClientArray> array;
};

namespace hvl {
namespace {

// Guards current_node. A thread that holds it takes no other lock but the node's locks.
std::mutex node_mutex;
std::shared_ptr<ParameterNode> current_node;
bool is_stopping = false;  // guarded by node_mutex: current_node. No other one may complete handles beside it
UserRules user_rules;      // guarded by node_mutex
std::atomic<bool> is_child_of_node{false};

// Never destroyed: a thread may still wait for a handle while the process exits.
HandleTable& node_handles() {
  static HandleTable* table = new HandleTable;
  return *table;
}

// Takes the locks that a child may use later, so that no other thread holds them while the process is forked.
void lock_node() {
  node_mutex.lock();
  if (current_node != nullptr) current_node->lock();
  node_handles().lock();
}

void unlock_node() {
  node_handles().unlock();
  if (current_node != nullptr) current_node->unlock();
  node_mutex.unlock();
}

// The node's thread exists in the parent only.
void forget_node() {
  node_handles().unlock();
  if (current_node != nullptr) {
    current_node->close_in_child();
    current_node->unlock();
    new std::shared_ptr<ParameterNode>(std::move(current_node));  // never destroyed
    current_node = nullptr;
    is_child_of_node = true;
  }
  node_mutex.unlock();
}

Status no_node() {
  if (is_child_of_node) {
    return Status(HVL_NOT_INITIALIZED,
                  "this process was forked from one that uses parameter servers, which do not come along with fork(): "
                  "start it before, or with the 'spawn' method");
  }
  return Status(HVL_NOT_INITIALIZED, "this process is connected to no parameter server");
}

std::shared_ptr<ParameterNode> node() {
  const std::lock_guard<std::mutex> lock(node_mutex);
  return current_node;
}

void handle_forks() {
  static int once = pthread_atfork(lock_node, unlock_node, forget_node);
  (void)once;
}

// Calls function(node), for a node that is started if there is none.
template <typename Function>
Status with_node(Function&& function) {
  const std::lock_guard<std::mutex> lock(node_mutex);
  if (is_child_of_node) return no_node();
  if (is_stopping) return Status(HVL_SHUT_DOWN, "this process is just stopping its parameter servers and clients");
  handle_forks();
  if (current_node == nullptr) {
    current_node = std::make_shared<ParameterNode>(&node_handles());
    current_node->set_user_rules(user_rules);
  }
  function(current_node.get());
  return Status();
}

Status make_tcp(const hvl_parameters_connection& given, PeerConnection* connection) {
  hvl_connection wanted{given.fd, 0, HVL_MESSAGES, {}, {}};
  std::memcpy(wanted.send_key, given.send_key, sizeof wanted.send_key);
  std::memcpy(wanted.receive_key, given.receive_key, sizeof wanted.receive_key);
  const bool seals = given.has_keys != 0 && given.seal_data != 0;
  std::optional<MessageKeys> keys;
  std::unique_ptr<Mesh> mesh = make_tcp_transport({wanted}, seals)->make_message_stream(0, connection->peer, &keys);
  connection->stream = std::make_unique<MeshStream>(std::move(mesh), 0);
  if (given.has_keys != 0) connection->keys = keys;
  return Status();
}

Status make_connection(const hvl_parameters_connection& given, int local_rank, PeerConnection* connection) {
  connection->peer = given.peer;
  if (given.is_own != 0) return Status();
  if (given.memory_fd < 0) return make_tcp(given, connection);
  std::shared_ptr<HostMemory> memory;
  const Status status = HostMemory::map(given.memory_fd, PeerConnection::shape(), &memory);
  if (!status.ok()) return status;
  return PeerConnection::make_local(given.peer, std::move(memory), local_rank, given.peer_pid, given.fd, connection);
}

// Makes a request with `make`, and begins it. Returns its handle, or a negated hvl_status.
template <typename Make>
int64_t start(Make&& make) {
  int64_t handle = 0;
  const int32_t status = guarded([&]() -> Status {
    const std::shared_ptr<ParameterNode> running = node();
    if (running == nullptr) return no_node();
    auto request = std::make_unique<ClientRequest>();
    Status made = make(request.get());
    return made.ok() ? running->start(std::move(request), &handle) : made;
  });
  return status == HVL_OK ? handle : -status;
}

Status read_update(const hvl_parameters_update& given, Update* update, Conversion* conversion) {
  const std::string name = given.rule != nullptr ? given.rule : "";
  if (name.empty() || name.size() > HVL_PARAMETERS_NAME_BYTES) {
    return Status(HVL_INVALID_ARGUMENT, "the name of a rule has 1 to " + std::to_string(HVL_PARAMETERS_NAME_BYTES) +
                                            " bytes: '" + name + "'");
  }
  if (given.num_arguments < 0 || given.num_arguments > kMostRuleArguments) {
    return Status(HVL_INVALID_ARGUMENT,
                  "the rule '" + name + "' has more than " + std::to_string(kMostRuleArguments) + " arguments");
  }
  if (given.payload < HVL_PAYLOAD_FULL || given.payload > HVL_PAYLOAD_INT8) {
    return Status(HVL_INVALID_ARGUMENT, "there is no such payload");
  }
  if (!find_rule(name, &update->rule)) {
    update->rule = Rule::kNamed;
    update->name = name;
    update->num_arguments = given.num_arguments;
  }
  if (num_arguments(*update) != given.num_arguments) {
    return Status(HVL_INVALID_ARGUMENT, "the rule '" + name + "' has " + std::to_string(num_arguments(*update)) +
                                            " arguments, not " + std::to_string(given.num_arguments));
  }
  std::copy_n(given.arguments, given.num_arguments, update->arguments);
  *conversion = Conversion{static_cast<Payload>(given.payload), given.feeds_errors_back != 0};
  return Status();
}

// As start(), for an update.
template <typename Make>
int64_t start_update(const hvl_parameters_update* given, Make&& make) {
  return start([&](ClientRequest* request) {
    Update update;
    Conversion conversion;
    const Status status = read_update(*given, &update, &conversion);
    return status.ok() ? make(update, conversion, request) : status;
  });
}

char* writable(const void* memory) { return const_cast<char*>(static_cast<const char*>(memory)); }

}  // namespace
}  // namespace hvl

extern "C" {

int64_t hvl_parameters_segment_bytes(void) {
  return static_cast<int64_t>(hvl::HostMemory::bytes_needed(hvl::PeerConnection::shape()));
}

int32_t hvl_parameters_add_client(const hvl_parameters_connection* given) {
  return hvl::guarded([&] {
    hvl::PeerConnection connection;
    const hvl::Status status = given->is_own == 0
                                   ? hvl::make_connection(*given, 1, &connection)
                                   : hvl::Status(HVL_INVALID_ARGUMENT, "a client has a connection to this process");
    if (!status.ok()) return status;
    return hvl::with_node([&](hvl::ParameterNode* node) { node->add_client(std::move(connection)); });
  });
}

int64_t hvl_parameters_add_server(const hvl_parameters_connection* given) {
  int64_t server = 0;
  const int32_t status = hvl::guarded([&] {
    hvl::PeerConnection connection;
    const hvl::Status status = hvl::make_connection(*given, 0, &connection);
    if (!status.ok()) return status;
    return hvl::with_node([&](hvl::ParameterNode* node) { server = node->add_server(std::move(connection)); });
  });
  return status == HVL_OK ? server : -status;
}

int32_t hvl_parameters_remove_server(int64_t server) {
  return hvl::guarded([&] {
    const std::shared_ptr<hvl::ParameterNode> running = hvl::node();
    if (running == nullptr) return hvl::no_node();
    running->remove_server(server);
    return hvl::Status();
  });
}

int32_t hvl_parameters_stop(void) {
  return hvl::guarded([] {
    std::shared_ptr<hvl::ParameterNode> ending;
    {
      const std::lock_guard<std::mutex> lock(hvl::node_mutex);
      if (hvl::current_node == nullptr || std::exchange(hvl::is_stopping, true)) return hvl::Status();
      ending = hvl::current_node;
    }
    ending->stop();
    const std::lock_guard<std::mutex> lock(hvl::node_mutex);
    hvl::current_node = nullptr;
    hvl::is_stopping = false;
    return hvl::Status();
  });
}

int32_t hvl_parameters_set_rule(hvl_parameters_rule rule, void* context) {
  return hvl::guarded([&] {
    const std::lock_guard<std::mutex> lock(hvl::node_mutex);
    hvl::user_rules = hvl::UserRules{rule, context};
    if (hvl::current_node != nullptr) hvl::current_node->set_user_rules(hvl::user_rules);
    return hvl::Status();
  });
}

hvl_parameters_array* hvl_parameters_open(const hvl_parameters_array_config* config) {
  std::unique_ptr<hvl_parameters_array> opened;
  hvl::guarded([&] {
    opened = std::make_unique<hvl_parameters_array>();
    const hvl::Status status = hvl::ClientArray::make(*config, &opened->array);
    if (!status.ok()) opened = nullptr;
    return status;
  });
  return opened.release();
}

void hvl_parameters_close(hvl_parameters_array* array) { delete array; }

int64_t hvl_parameters_create(hvl_parameters_array* array) {
  return hvl::start([&](hvl::ClientRequest* request) { return array->array->create(request); });
}

int64_t hvl_parameters_remove(hvl_parameters_array* array) {
  return hvl::start([&](hvl::ClientRequest* request) { return array->array->remove(request); });
}

int64_t hvl_parameters_send(hvl_parameters_array* array, const hvl_parameters_update* update, int64_t offset,
                            int64_t count, const void* elements) {
  return hvl::start_update(
      update, [&](const hvl::Update& read, const hvl::Conversion& conversion, hvl::ClientRequest* request) {
        return array->array->send(read, conversion, offset, count, static_cast<const char*>(elements), request);
      });
}

int64_t hvl_parameters_receive(hvl_parameters_array* array, int64_t offset, int64_t count, void* elements) {
  return hvl::start([&](hvl::ClientRequest* request) {
    return array->array->receive(offset, count, static_cast<char*>(elements), request);
  });
}

int64_t hvl_parameters_send_rows(hvl_parameters_array* array, const hvl_parameters_update* update,
                                 const int64_t* indices, int64_t num_rows, int64_t row_length, const void* rows) {
  return hvl::start_update(
      update, [&](const hvl::Update& read, const hvl::Conversion& conversion, hvl::ClientRequest* request) {
        return array->array->send_rows(read, conversion, {indices, num_rows, row_length},
                                       static_cast<const char*>(rows), request);
      });
}

int64_t hvl_parameters_receive_rows(hvl_parameters_array* array, const int64_t* indices, int64_t num_rows,
                                    int64_t row_length, void* rows) {
  return hvl::start([&](hvl::ClientRequest* request) {
    return array->array->receive_rows({indices, num_rows, row_length}, static_cast<char*>(rows), request);
  });
}

int64_t hvl_parameters_send_state(hvl_parameters_array* array, int32_t state, const void* values) {
  return hvl::start([&](hvl::ClientRequest* request) {
    return array->array->move_state(hvl::Command::Kind::kPush, state, hvl::writable(values), request);
  });
}

int64_t hvl_parameters_receive_state(hvl_parameters_array* array, int32_t state, void* values) {
  return hvl::start([&](hvl::ClientRequest* request) {
    return array->array->move_state(hvl::Command::Kind::kPull, state, hvl::writable(values), request);
  });
}

int64_t hvl_parameters_tick(hvl_parameters_array* array, int64_t staleness) {
  return hvl::start([&](hvl::ClientRequest* request) { return array->array->tick(staleness, request); });
}

int32_t hvl_parameters_poll(int64_t handle) {
  int32_t complete = 0;
  const int32_t status = hvl::guarded([&] {
    if (hvl::is_child_of_node) return hvl::no_node();
    const hvl_status found = hvl::node_handles().poll(handle);
    complete = found == HVL_OK ? 1 : 0;
    return found == HVL_UNKNOWN_HANDLE ? hvl::Status(found, "the handle is unknown or was waited for already")
                                       : hvl::Status();
  });
  return status == HVL_OK ? complete : -status;
}

int32_t hvl_parameters_wait(int64_t handle, double timeout) {
  int64_t handles[] = {handle};
  return hvl_parameters_wait_all(handles, 1, timeout);
}

int32_t hvl_parameters_wait_all(int64_t* handles, int32_t count, double timeout) {
  return hvl::guarded([&] {
    if (hvl::is_child_of_node) return hvl::no_node();
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    for (int32_t index = 0; index < count; ++index) {
      if (handles[index] == 0) continue;
      const hvl_status found = hvl::node_handles().wait(handles[index], deadline);
      if (found == HVL_IN_PROGRESS) return hvl::Status(found, "the call is not complete yet");
      if (found != HVL_OK) return hvl::Status(found, "the handle is unknown or was waited for already");
    }
    return hvl::node_handles().consume_all(handles, static_cast<size_t>(count));
  });
}

}  // extern "C"
