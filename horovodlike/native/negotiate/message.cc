#include "negotiate/message.h"

#include "negotiate/wire.h"

namespace hvl {
namespace {

constexpr size_t kMinTensorBytes = 2;  // dtype and number of dimensions
constexpr uint8_t kForRanks = 0x80;    // a flag in the type of a message: it names its ranks

Status malformed(const char* what) { return Status(HVL_JOB_BROKEN, std::string("malformed control message: ") + what); }

void write_ids(const std::vector<TensorId>& ids, Writer* out) {
  out->put(static_cast<uint32_t>(ids.size()));
  out->put_array(ids.data(), ids.size());
}

void write_absent(const std::vector<int32_t>& absent, Writer* out) {
  out->put(static_cast<uint32_t>(absent.size()));
  out->put_array(absent.data(), absent.size());
}

void write_text(const std::string& text, Writer* out) {
  out->put(static_cast<uint32_t>(text.size()));
  out->put_array(text.data(), text.size());
}

void write_name(const std::string& name, Writer* out) {
  out->put(static_cast<uint16_t>(name.size()));
  out->put_array(name.data(), name.size());
}

void write_speakers(const Message& message, Writer* out) {
  out->put(static_cast<uint32_t>(message.ranks.ranges().size()));
  for (const RankRange& range : message.ranks.ranges()) {
    out->put(range.first);
    out->put(range.last);
  }
  out->put(message.latest);
  out->put(message.age);
  out->put(message.spread);
}

void write_varying(const std::vector<int64_t>& varying, Writer* out) {
  out->put(static_cast<uint32_t>(varying.size()));
  out->put_array(varying.data(), varying.size());
}

void write_signature(const Signature& signature, Writer* out) {
  out->put(static_cast<uint8_t>(signature.kind));
  out->put(static_cast<uint8_t>(signature.op));
  out->put(static_cast<uint8_t>(signature.device));
  out->put(signature.root);
  out->put(signature.process_set);
  out->put(signature.prescale);
  out->put(signature.postscale);
  write_name(signature.name, out);
  out->put(static_cast<uint32_t>(signature.tensors.size()));
  for (const TensorSignature& tensor : signature.tensors) {
    out->put(static_cast<uint8_t>(tensor.dtype));
    out->put(static_cast<uint8_t>(tensor.shape.size()));
    out->put_array(tensor.shape.data(), tensor.shape.size());
  }
  out->put(static_cast<uint32_t>(signature.arguments.size()));
  out->put_array(signature.arguments.data(), signature.arguments.size());
}

const char* read_ids(Reader* in, std::vector<TensorId>* ids) {
  uint32_t count = 0;
  if (!in->get(&count) || !in->get_array(count, ids)) return "list of ids cut short";
  return nullptr;
}

const char* read_absent(Reader* in, std::vector<int32_t>* absent) {
  uint32_t count = 0;
  if (!in->get(&count) || !in->get_array(count, absent)) return "absent ranks cut short";
  return nullptr;
}

const char* read_text(Reader* in, std::string* text) {
  uint32_t length = 0;
  if (!in->get(&length) || !in->get_array(length, text)) return "text cut short";
  return nullptr;
}

const char* read_name(Reader* in, std::string* name) {
  uint16_t length = 0;
  if (!in->get(&length)) return "name cut short";
  if (length > kMaxNameBytes) return "name too long";
  return in->get_array(length, name) ? nullptr : "name cut short";
}

const char* read_speakers(Reader* in, Message* message) {
  uint32_t count = 0;
  if (!in->get(&count) || count == 0) return "number of ranges of ranks";
  for (; count > 0; --count) {
    RankRange range;
    if (!in->get(&range.first) || !in->get(&range.last)) return "ranges of ranks cut short";
    const int32_t least = message->ranks.empty() ? 0 : message->ranks.highest() + 2;
    if (range.first < least || range.last < range.first || range.last >= kMaxRanks) return "range of ranks";
    message->ranks.add(range);
  }
  if (!in->get(&message->latest) || !message->ranks.contains(message->latest)) return "latest rank";
  return in->get(&message->age) && in->get(&message->spread) ? nullptr : "times cut short";
}

// Adds the tensor's bytes to `*num_bytes`, which stays below 2^63 so that later sums need no check.
const char* read_tensor(Reader* in, TensorSignature* tensor, int64_t* num_bytes) {
  uint8_t ndim = 0;
  if (!in->get_enum(0, kNumDataTypes - 1, &tensor->dtype)) return "data type";
  if (!in->get(&ndim) || ndim > kMaxDimensions) return "number of dimensions";
  if (!in->get_array(ndim, &tensor->shape)) return "shape cut short";
  // Zero extents are left out of the product, so that no order of the extents can overflow num_elements().
  int64_t bytes = static_cast<int64_t>(size_of(tensor->dtype));
  bool empty = false;
  for (int64_t extent : tensor->shape) {
    if (extent < 0) return "negative extent";
    if (extent == 0) empty = true;
    if (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes)) return "tensor too large";
  }
  if (__builtin_add_overflow(*num_bytes, empty ? 0 : bytes, num_bytes)) return "tensors too large";
  return nullptr;
}

const char* read_tensors(Reader* in, Signature* signature) {
  uint32_t count = 0;
  if (!in->get(&count)) return "number of tensors cut short";
  if (count > kMaxGroup || count > in->remaining() / kMinTensorBytes) return "number of tensors";
  if ((count == 0) == has_tensors(signature->kind)) return "number of tensors";
  signature->tensors.resize(count);
  int64_t num_bytes = 0;
  for (TensorSignature& tensor : signature->tensors) {
    if (const char* error = read_tensor(in, &tensor, &num_bytes)) return error;
  }
  return nullptr;
}

// True if the splits fit an alltoall's tensor of `rows` rows.
bool splits_fit(const int64_t* splits, size_t count, int64_t rows) {
  for (const int64_t* split = splits; split != splits + count; ++split) {
    if (*split < 0 || *split > rows || *split > INT32_MAX) return false;
    rows -= *split;
  }
  return true;
}

const char* check_arguments(const Signature& signature) {
  const std::vector<int64_t>& arguments = signature.arguments;
  const size_t num_tensors = signature.tensors.size();
  int64_t least = 0;
  if (changes_process_sets(signature.kind) && signature.process_set != 0) return "process set of a change";
  switch (signature.kind) {
    case HVL_ALLREDUCE:
      if (!arguments.empty() && arguments.size() != num_tensors) return "number of memory formats";
      for (size_t t = 0; t < arguments.size(); ++t) {
        if (!is_memory_format(arguments[t], signature.tensors[t].shape.size())) return "memory format";
      }
      return nullptr;
    case HVL_ALLTOALL:
      if (arguments.size() % num_tensors != 0) return "number of splits";
      for (size_t t = 0; t < num_tensors; ++t) {
        const Shape& shape = signature.tensors[t].shape;
        const size_t count = arguments.size() / num_tensors;
        if (!splits_fit(arguments.data() + t * count, count, shape.empty() ? 0 : shape[0])) return "splits";
      }
      return nullptr;
    case HVL_ADD_PROCESS_SET:
      for (int64_t rank : arguments) {
        if (rank < least || rank > INT32_MAX) return "ranks of a process set";
        least = rank + 1;
      }
      return arguments.empty() ? "process set without ranks" : nullptr;
    case HVL_REMOVE_PROCESS_SET: return arguments.size() == 1 ? nullptr : "number of arguments";
    case HVL_ALLGATHER:
    case HVL_BROADCAST:
    case HVL_BARRIER:
    case HVL_REDUCESCATTER:
    case HVL_JOIN:
    case HVL_GATHER:
    case HVL_SCATTER:
    case HVL_REDUCE: return arguments.empty() ? nullptr : "number of arguments";
  }
  __builtin_unreachable();
}

const char* read_signature(Reader* in, Signature* signature) {
  if (!in->get_enum(0, kNumKinds - 1, &signature->kind)) return "kind";
  if (!in->get_enum(0, kNumReduceOps - 1, &signature->op)) return "reduction operation";
  if (!in->get_enum(HVL_CPU, HVL_CUDA, &signature->device)) return "device";
  if (!in->get(&signature->root) || !in->get(&signature->process_set)) return "signature cut short";
  if (!in->get(&signature->prescale) || !in->get(&signature->postscale)) return "signature cut short";
  if (const char* error = read_name(in, &signature->name)) return error;
  if (const char* error = read_tensors(in, signature)) return error;
  uint32_t count = 0;
  if (!in->get(&count) || !in->get_array(count, &signature->arguments)) return "arguments cut short";
  return check_arguments(*signature);
}

// An allgather, gather or alltoall computes addresses from these, so they must add up to the extents in the signature.
const char* check_varying(const Signature& signature, const std::vector<int64_t>& varying, size_t per_rank) {
  if (!allocates(signature.kind)) return varying.empty() ? nullptr : "varying numbers where nothing varies";
  const size_t num_tensors = signature.tensors.size();
  if (signature.kind != HVL_ALLTOALL ? per_rank != num_tensors
                                     : per_rank <= num_tensors || per_rank % num_tensors != 0) {
    return "number of varying numbers of a rank";
  }
  if (varying.empty() || varying.size() % per_rank != 0) return "number of varying numbers";
  for (int64_t number : varying) {
    if (number < 0) return "negative varying number";
  }
  for (size_t t = 0; t < num_tensors; ++t) {
    const Shape& shape = signature.tensors[t].shape;
    int64_t sum = 0;
    for (size_t at = t; at < varying.size(); at += per_rank) {
      if (__builtin_add_overflow(sum, varying[at], &sum)) return "first dimension";
    }
    if (shape.empty() || shape[0] != sum) return "sum of first dimensions";
  }
  const size_t num_splits = per_rank / num_tensors - 1;  // for each tensor
  for (size_t begin = 0; begin < varying.size(); begin += per_rank) {
    for (size_t t = 0; t < num_tensors; ++t) {
      const int64_t* splits = varying.data() + begin + num_tensors + t * num_splits;
      if (!splits_fit(splits, num_splits, varying[begin + t])) return "splits";
    }
  }
  return nullptr;
}

// Checks the varying values of a request for several ranks. No rank's tensor may be too large.
const char* check_varying_of(const Message& message) {
  const Signature& signature = message.signature;
  const size_t num_ranks = static_cast<size_t>(message.ranks.size());
  const size_t num_tensors = signature.tensors.size();
  if (!allocates(signature.kind)) return "varying numbers where nothing varies";
  if (message.varying.size() % num_ranks != 0) return "number of varying numbers";
  const size_t per_rank = message.varying.size() / num_ranks;
  if (signature.kind != HVL_ALLTOALL ? per_rank != num_tensors : per_rank % num_tensors != 0) {
    return "number of varying numbers of a rank";
  }
  if (!signature.arguments.empty()) return "arguments beside varying numbers";
  for (size_t t = 0; t < num_tensors; ++t) {
    const TensorSignature& tensor = signature.tensors[t];
    if (!tensor.shape.empty() && tensor.shape[0] != 0) return "first dimension beside varying numbers";
    int64_t row = static_cast<int64_t>(size_of(tensor.dtype));
    for (int64_t extent : tensor.shape) row *= extent == 0 ? 1 : extent;  // no overflow: see read_tensor()
    for (size_t begin = 0; begin < message.varying.size(); begin += per_rank) {
      const int64_t rows = message.varying[begin + t];
      int64_t bytes = 0;
      if (rows < 0 || (tensor.shape.empty() && rows != 0)) return "rows of a rank";
      if (__builtin_mul_overflow(row, rows, &bytes)) return "tensor too large";
      const size_t num_splits = per_rank / num_tensors - 1;
      const int64_t* splits = message.varying.data() + begin + num_tensors + t * num_splits;
      if (!splits_fit(splits, num_splits, rows)) return "splits";
    }
  }
  return nullptr;
}

const char* read_request(Reader* in, Message* message) {
  if (const char* error = read_signature(in, &message->signature)) return error;
  if (message->ranks.empty()) return nullptr;
  uint32_t count = 0;
  if (!in->get(&count) || !in->get_array(count, &message->varying)) return "varying numbers cut short";
  return count == 0 ? nullptr : check_varying_of(*message);
}

const char* read_definition(Reader* in, Record* record) {
  uint32_t count = 0;
  if (!in->get(&record->id)) return "id cut short";
  if (const char* error = read_signature(in, &record->signature)) return error;
  if (!in->get(&record->varying_per_rank)) return "varying numbers cut short";
  if (!in->get(&count) || !in->get_array(count, &record->varying)) return "varying numbers cut short";
  if (!in->get(&record->replaces)) return "id that is replaced cut short";
  if (const char* error = read_absent(in, &record->absent)) return error;
  return check_varying(record->signature, record->varying, record->varying_per_rank);
}

const char* read_execution(Reader* in, Record* record) {
  if (const char* error = read_ids(in, &record->ids)) return error;
  if (const char* error = read_absent(in, &record->absent)) return error;
  if (!in->get(&record->last_joined)) return "execution cut short";
  return nullptr;
}

const char* read_error(Reader* in, Record* record) {
  if (!in->get_enum(HVL_INVALID_ARGUMENT, HVL_UNKNOWN_HANDLE, &record->status)) return "status";
  if (!in->get(&record->signature.process_set)) return "process set cut short";
  if (const char* error = read_name(in, &record->signature.name)) return error;
  if (const char* error = read_absent(in, &record->absent)) return error;
  return read_text(in, &record->text);
}

const char* read_shutdown(Reader* in, Record* record) {
  if (!in->get_enum(HVL_JOB_BROKEN, HVL_SHUT_DOWN, &record->status)) return "status";
  return read_text(in, &record->text);
}

const char* read_body(Reader* in, Message* message) {
  const uint8_t type = static_cast<uint8_t>(message->type);
  if ((type & kForRanks) != 0) {
    message->type = static_cast<Message::Type>(type & ~kForRanks);
    if (const char* error = read_speakers(in, message)) return error;
  }
  switch (message->type) {
    case Message::Type::kReady: return read_ids(in, &message->ids);
    case Message::Type::kRequest: return read_request(in, message);
    case Message::Type::kShutdown: return read_text(in, &message->text);
  }
  return "type";
}

const char* read_body(Reader* in, Record* record) {
  switch (record->type) {
    case Record::Type::kDefine: return read_definition(in, record);
    case Record::Type::kExecute: return read_execution(in, record);
    case Record::Type::kEvict: return read_ids(in, &record->ids);
    case Record::Type::kError: return read_error(in, record);
    case Record::Type::kShutdown: return read_shutdown(in, record);
  }
  return "type";
}

// Makes the object as new, but keeps the memory of the members that the hot path uses.
void reset(Message* message) {
  message->ids.clear();
  message->signature = Signature();
  message->text.clear();
  message->ranks.clear();
  message->latest = -1;
  message->age = message->spread = 0;
  message->varying.clear();
}

void reset(Record* record) {
  std::vector<TensorId> ids = std::move(record->ids);
  *record = Record();
  ids.clear();
  record->ids = std::move(ids);
}

template <typename T>
Status decode_exactly(const void* bytes, size_t num_bytes, T* result) {
  reset(result);
  Reader in(bytes, num_bytes);
  uint8_t type = 0;
  if (!in.get(&type)) return malformed("empty");
  result->type = static_cast<typename T::Type>(type);
  if (const char* error = read_body(&in, result)) return malformed(error);
  return in.remaining() == 0 ? Status() : malformed("bytes left over");
}

}  // namespace

Status protocol_error(int rank, const std::string& what) {
  return Status(HVL_JOB_BROKEN, "Protocol error: rank " + std::to_string(rank) + " " + what + ".");
}

void encode(const Message& message, std::string* out) {
  Writer writer(out);
  const bool alone = message.ranks.empty();
  writer.put(static_cast<uint8_t>(static_cast<uint8_t>(message.type) | (alone ? 0 : kForRanks)));
  if (!alone) write_speakers(message, &writer);
  switch (message.type) {
    case Message::Type::kReady: return write_ids(message.ids, &writer);
    case Message::Type::kRequest:
      write_signature(message.signature, &writer);
      if (!alone) write_varying(message.varying, &writer);
      return;
    case Message::Type::kShutdown: return write_text(message.text, &writer);
  }
}

void encode(const Record& record, std::string* out) {
  Writer writer(out);
  writer.put(static_cast<uint8_t>(record.type));
  switch (record.type) {
    case Record::Type::kDefine:
      writer.put(record.id);
      write_signature(record.signature, &writer);
      writer.put(record.varying_per_rank);
      write_varying(record.varying, &writer);
      writer.put(record.replaces);
      return write_absent(record.absent, &writer);
    case Record::Type::kExecute:
      write_ids(record.ids, &writer);
      write_absent(record.absent, &writer);
      return writer.put(record.last_joined);
    case Record::Type::kEvict: return write_ids(record.ids, &writer);
    case Record::Type::kError:
      writer.put(static_cast<uint8_t>(record.status));
      writer.put(record.signature.process_set);
      write_name(record.signature.name, &writer);
      write_absent(record.absent, &writer);
      return write_text(record.text, &writer);
    case Record::Type::kShutdown:
      writer.put(static_cast<uint8_t>(record.status));
      return write_text(record.text, &writer);
  }
}

Status decode(const void* bytes, size_t num_bytes, Message* message) {
  return decode_exactly(bytes, num_bytes, message);
}

Status decode(const void* bytes, size_t num_bytes, Record* record) { return decode_exactly(bytes, num_bytes, record); }

}  // namespace hvl
