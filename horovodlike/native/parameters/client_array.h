// An array of parameters, as a client sees it: its shards on the servers, and its requests as commands to them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hvl_parameters.h"
#include "parameters/client_request.h"

namespace hvl {

// The conversion of the elements of a push.
struct Conversion {
  Payload payload = HVL_PAYLOAD_FULL;
  bool feeds_errors_back = false;
};

// Rows of an array: row i has the elements [i * length, (i + 1) * length).
struct Rows {
  const int64_t* indices;
  int64_t count;
  int64_t length;
};

// Any thread. The functions that make a request check its arguments: an error names the wrong one. Elements are
// borrowed until the request has ended. A request without commands is done.
class ClientArray {
 public:
  using RequestPtr = std::unique_ptr<ClientRequest>;

  // An error names the wrong part of the description.
  static Status make(const hvl_parameters_array_config& config, std::unique_ptr<ClientArray>* array);

  Status create(ClientRequest* request) const;
  Status remove(ClientRequest* request) const;
  Status tick(int64_t staleness, ClientRequest* request) const;
  Status send(const Update& update, const Conversion& conversion, int64_t offset, int64_t count, const char* elements,
              ClientRequest* request);
  Status receive(int64_t offset, int64_t count, char* elements, ClientRequest* request) const;
  Status send_rows(const Update& update, const Conversion& conversion, const Rows& rows, const char* elements,
                   ClientRequest* request);
  Status receive_rows(const Rows& rows, char* elements, ClientRequest* request) const;
  // kPush or kPull for all of a part but the values.
  Status move_state(Command::Kind kind, int32_t state, char* memory, ClientRequest* request) const;

 private:
  // The elements of one shard.
  struct ShardRange {
    int64_t server = 0;
    uint64_t begin = 0;  // in the array
    uint64_t count = 0;
  };
  // The elements that one command moves, which are on one shard: as many ranges of each kind.
  struct CommandRanges {
    std::vector<Range> in_shard, in_array, in_rows;
    uint64_t num_bytes = 0;  // size of the elements and the ranges
  };

  ClientArray() = default;
  ClientCommand* add_command(Command::Kind kind, size_t shard, ClientRequest* request) const;
  // Appends the commands for items of a part that are on one shard. `memory`: the items' memory.
  void add_commands(const Command& command, size_t shard, Range items, char* memory, ClientRequest* request) const;
  // Calls function(shard, range in the shard, elements in front) for each shard that has some of the elements.
  template <typename Function>
  void for_each_shard(const Range& elements, Function&& function) const;
  // Calls function(shard, ranges of a command) until the rows are done.
  template <typename Function>
  void for_each_command(const Rows& rows, Function&& function) const;
  Status check_update(const Update& update, const Conversion& conversion) const;
  Status check_rows(const Rows& rows, bool has_memory, const void* elements) const;
  Status check_elements(int64_t offset, int64_t count, bool has_memory, const void* elements) const;
  // Returns the payload of a push: the ranges, if it has some, and the elements in `format`.
  void pack(const Conversion& conversion, const CommandRanges& ranges, const char* elements, ClientCommand* command);
  void convert(const Update& update, const Conversion& conversion, const std::vector<Range>& in_array,
               const char* elements, uint64_t count, char* converted);

  uint64_t id_ = 0;
  DataType dtype_ = HVL_FLOAT32;
  uint64_t num_clients_ = 0;
  uint64_t client_ = 0;  // chosen at random
  std::vector<ShardRange> shards_;
  uint64_t count_ = 0;
  std::mutex mutex_;  // a leaf lock
  // Guarded by mutex_. The errors of conversions, by rule and its name. All rules that add share one array: the sum
  // that the values lack.
  std::map<std::pair<Rule, std::string>, std::vector<char>> residuals_;
};

}  // namespace hvl
