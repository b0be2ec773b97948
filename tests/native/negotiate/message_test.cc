#include "negotiate/message.h"

#include <cstring>
#include <limits>

#include "check.h"
#include "message_seeds.h"

using namespace hvl;

namespace {

template <typename T>
Status decode_copy(const std::string& bytes, T* value) {
  const std::vector<char> exact(bytes.begin(), bytes.end());  // a sanitizer sees reads past the end
  return decode(exact.data(), exact.size(), value);
}

template <typename T>
bool decodes(const std::string& bytes) {
  T value;
  return decode_copy(bytes, &value).ok();
}

Message request_of(const Signature& signature) {
  Message message;
  message.type = Message::Type::kRequest;
  message.signature = signature;
  return message;
}

bool request_decodes(const std::vector<TensorSignature>& tensors) {
  Signature signature = seed_signature(HVL_ALLREDUCE);
  signature.tensors = tensors;
  return decodes<Message>(encoded(request_of(signature)));
}

template <typename T>
void check_cuts(const T& seed) {
  const std::string bytes = encoded(seed);
  for (size_t length = 0; length < bytes.size(); ++length) CHECK(!decodes<T>(bytes.substr(0, length)));
  CHECK(decodes<T>(bytes));
  CHECK(!decodes<T>(bytes + '\0'));
}

// A changed message is refused, or it is another valid message: then it has this encoding and no other.
template <typename T>
void check_flips(const T& seed) {
  const std::string bytes = encoded(seed);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    T value;
    if (decode_copy(flipped, &value).ok()) CHECK(encoded(value) == flipped);
  }
}

Record seed_record(Record::Type type) {
  for (const Record& record : seed_records()) {
    if (record.type == type) return record;
  }
  REQUIRE(false);
  return Record();
}

// The byte at `offset` may have the values for which is_valid() is true, and no others.
template <typename T, typename IsValid>
void check_values(const T& seed, size_t offset, IsValid&& is_valid) {
  std::string bytes = encoded(seed);
  for (int value = 0; value < 256; ++value) {
    bytes[offset] = static_cast<char>(value);
    if (decodes<T>(bytes) != is_valid(value)) {
      check::report(false, __FILE__, __LINE__, "value " + std::to_string(value) + " at " + std::to_string(offset));
    }
  }
}

template <typename T>
void check_range(const T& seed, size_t offset, int first, int last) {
  check_values(seed, offset, [&](int value) { return first <= value && value <= last; });
}

std::string with_count(std::string bytes, size_t offset, uint32_t count) {
  std::memcpy(&bytes[offset], &count, sizeof count);
  return bytes;
}

constexpr size_t kDtypeOffset = 1 + 3 + 4 + 4 + 8 + 8 + 2 + 4;  // of a request with an empty name

}  // namespace

TEST(messages_come_back_as_they_were) {
  for (const Message& seed : seed_messages()) {
    Message back;
    REQUIRE(decode_copy(encoded(seed), &back).ok());
    CHECK(back.type == seed.type);
    CHECK(back.ids == seed.ids);
    CHECK(back.signature == seed.signature);
    CHECK_EQ(back.text, seed.text);
    CHECK(back.ranks == seed.ranks);
    CHECK_EQ(back.latest, seed.latest);
    CHECK_EQ(back.age, seed.age);
    CHECK_EQ(back.spread, seed.spread);
    CHECK(back.varying == seed.varying);
  }
}

TEST(records_come_back_as_they_were) {
  for (const Record& seed : seed_records()) {
    Record back;
    REQUIRE(decode_copy(encoded(seed), &back).ok());
    CHECK(back.type == seed.type);
    CHECK_EQ(back.id, seed.id);
    CHECK(back.signature == seed.signature);
    CHECK(back.varying == seed.varying);
    CHECK_EQ(back.replaces, seed.replaces);
    CHECK(back.ids == seed.ids);
    CHECK(back.status == seed.status);
    CHECK_EQ(back.text, seed.text);
  }
}

TEST(encode_appends_and_decode_forgets_what_was_there) {
  std::string bytes = "before";
  encode(seed_messages()[0], &bytes);
  CHECK_EQ(bytes.substr(0, 6), "before");
  CHECK_EQ(bytes.size(), 6 + 1 + 4 + 4 * 4);

  Message message = request_of(seed_signature(HVL_ALLREDUCE));
  message.text = "old";
  CHECK(decode(bytes.data() + 6, bytes.size() - 6, &message).ok());
  CHECK(message.signature == Signature());
  CHECK_EQ(message.text, "");
}

TEST(ranks_for_whom_a_message_speaks) {
  const auto accepts = [](const std::vector<int32_t>& ranges, int32_t latest) {
    Message message;
    message.speak_for(0, 0);
    std::string bytes = encoded(message);
    std::string list;
    for (int32_t rank : ranges) list.append(reinterpret_cast<const char*>(&rank), sizeof rank);
    list.append(reinterpret_cast<const char*>(&latest), sizeof latest);
    bytes.replace(1 + 4, 3 * 4, list);
    return decodes<Message>(with_count(bytes, 1, static_cast<uint32_t>(ranges.size() / 2)));
  };
  CHECK(accepts({0, 0}, 0));
  CHECK(accepts({0, 7, 9, 9, 4000, 65535}, 9));
  CHECK(!accepts({}, 0));
  CHECK(!accepts({0, 7, 9, 9}, 8));  // the latest is not one of them
  CHECK(!accepts({0, 7, 8, 9}, 8));  // is written as one range
  CHECK(!accepts({0, 7, 7, 9}, 8));
  CHECK(!accepts({9, 9, 0, 7}, 9));
  CHECK(!accepts({3, 2}, 2));
  CHECK(!accepts({-1, 2}, 2));
  CHECK(!accepts({0, 65536}, 0));
  CHECK(!accepts({0, 0x7fffffff, 0, 1}, 0));
}

TEST(what_varies_between_the_ranks_of_a_message) {
  const auto accepts = [](Kind kind, const std::vector<int64_t>& varying, const auto& change) {
    Message message = request_of(seed_signature(kind));
    message.ranks = RankSet({4, 5});
    message.latest = 4;
    if (!varying.empty()) take_varying(&message.signature);
    message.varying = varying;
    change(&message);
    return decodes<Message>(encoded(message));
  };
  const auto as_it_is = [](Message*) {};
  CHECK(accepts(HVL_GATHER, {1, 2, 3, 0}, as_it_is));
  CHECK(!accepts(HVL_GATHER, {1, 2, 1, 0, 0, 2, 3, 4, 1, 1, 0, 4}, as_it_is));  // splits, as of an alltoall
  CHECK(!accepts(HVL_SCATTER, {5, 4, 5, 4}, as_it_is));
  CHECK(accepts(HVL_ALLGATHER, {}, as_it_is));
  CHECK(accepts(HVL_ALLGATHER, {1, 2, 3, 0}, as_it_is));
  CHECK(!accepts(HVL_ALLGATHER, {1, 2, 3}, as_it_is));
  CHECK(!accepts(HVL_ALLGATHER, {1, 2}, as_it_is));
  CHECK(!accepts(HVL_ALLGATHER, {1, 2, 3, -1}, as_it_is));
  CHECK(!accepts(HVL_ALLGATHER, {1, 2, int64_t{1} << 60, 4}, as_it_is));  // of 7 columns of 4 bytes
  CHECK(!accepts(HVL_ALLGATHER, {1, 2, 3, 4}, [](Message* m) { m->signature.tensors[1].shape[0] = 4; }));
  CHECK(!accepts(HVL_ALLGATHER, {1, 2, 3, 4}, [](Message* m) { m->signature.tensors[1].shape.clear(); }));
  CHECK(accepts(HVL_ALLGATHER, {1, 0, 3, 0}, [](Message* m) { m->signature.tensors[1].shape.clear(); }));
  CHECK(accepts(HVL_ALLTOALL, {1, 2, 1, 0, 0, 2, 3, 4, 1, 1, 0, 4}, as_it_is));
  CHECK(accepts(HVL_ALLTOALL, {1, 2, 3, 4}, as_it_is));  // without splits, which are another matter
  CHECK(!accepts(HVL_ALLTOALL, {1, 2, 1, 1, 0, 2, 3, 4, 1, 1, 0, 4}, as_it_is));
  CHECK(!accepts(HVL_ALLTOALL, {1, 2, 1, 3, 4, 1}, as_it_is));
  CHECK(!accepts(HVL_ALLTOALL, {1, 2, 3, 4}, [](Message* m) { m->signature.arguments = {0, 0}; }));
  CHECK(!accepts(HVL_ALLREDUCE, {5, 4, 5, 4}, as_it_is));
}

TEST(the_wire_is_little_endian) {
  Message message;
  message.ids = {0x01020304};
  CHECK_EQ(encoded(message), std::string("\x01\x01\x00\x00\x00\x04\x03\x02\x01", 9));
}

TEST(cut_short_or_too_long) {
  for (const Message& seed : seed_messages()) check_cuts(seed);
  for (const Record& seed : seed_records()) check_cuts(seed);
  Message message;
  CHECK(!decode(nullptr, 0, &message).ok());
}

TEST(flipped_bits) {
  for (const Message& seed : seed_messages()) check_flips(seed);
  for (const Record& seed : seed_records()) check_flips(seed);
}

TEST(enumerations_are_checked) {
  Signature signature = seed_signature(HVL_ALLREDUCE);
  signature.name = "";
  signature.tensors = {{HVL_FLOAT32, {5}}};
  const Message request = request_of(signature);
  check_values(request, 1, [](int kind) { return kind < kNumKinds && has_tensors(static_cast<Kind>(kind)); });
  check_range(request, 2, HVL_AVERAGE, HVL_PRODUCT);
  check_range(request, 3, HVL_CPU, HVL_CUDA);
  check_range(request, kDtypeOffset, HVL_UINT8, HVL_FLOAT8_E5M2);
  check_range(seed_messages()[0], 0, 1, 1);  // a list of ids is no other message

  Record error = seed_record(Record::Type::kError);
  check_range(error, 1, HVL_INVALID_ARGUMENT, HVL_UNKNOWN_HANDLE);
  Record shutdown = seed_record(Record::Type::kShutdown);
  check_range(shutdown, 1, HVL_JOB_BROKEN, HVL_SHUT_DOWN);
  CHECK(!decodes<Message>(std::string("\x00\x00\x00\x00\x00", 5)));
  CHECK(!decodes<Record>(std::string("\x06\x00\x00\x00\x00", 5)));
}

TEST(shapes_are_checked) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  CHECK(request_decodes({{HVL_UINT8, {most}}}));
  CHECK(!request_decodes({{HVL_INT16, {most}}}));
  CHECK(!request_decodes({{HVL_UINT8, {-1}}}));
  CHECK(!request_decodes({{HVL_UINT8, {-1, -1}}}));
  CHECK(!request_decodes({{HVL_UINT8, {int64_t{1} << 32, int64_t{1} << 31}}}));
  CHECK(!request_decodes({{HVL_UINT8, {int64_t{1} << 62, 4, 0}}}));  // overflows on the way
  CHECK(!request_decodes({{HVL_UINT8, {most}}, {HVL_UINT8, {1}}}));
  CHECK(request_decodes({{HVL_UINT8, {most}}, {HVL_FLOAT64, {0}}}));
  CHECK(request_decodes({{HVL_FLOAT64, {1, 1, 1, 1, 1, 1, 1, 1}}}));
  CHECK(!request_decodes({{HVL_FLOAT64, {1, 1, 1, 1, 1, 1, 1, 1, 1}}}));
}

TEST(numbers_of_tensors_are_checked) {
  CHECK(!request_decodes({}));
  CHECK(request_decodes(std::vector<TensorSignature>(kMaxGroup)));
  CHECK(!request_decodes(std::vector<TensorSignature>(kMaxGroup + 1)));
  Signature barrier = seed_signature(HVL_BARRIER);
  barrier.tensors = {{HVL_FLOAT32, {1}}};
  CHECK(!decodes<Message>(encoded(request_of(barrier))));
}

TEST(arguments_are_checked) {
  const auto accepts = [](Kind kind, const std::vector<int64_t>& arguments) {
    Signature signature = seed_signature(kind);
    signature.arguments = arguments;
    return decodes<Message>(encoded(request_of(signature)));
  };
  CHECK(accepts(HVL_ALLTOALL, {5, 0, 1, 3}));  // of 5 and of 4 rows
  CHECK(!accepts(HVL_ALLTOALL, {5, 1, 1, 3}));
  CHECK(!accepts(HVL_ALLTOALL, {5, -1, 1, 3}));
  CHECK(!accepts(HVL_ALLTOALL, {1, 3, 5, 0}));
  CHECK(!accepts(HVL_ALLTOALL, {5, 0, 1}));  // not as many for each tensor
  CHECK(accepts(HVL_ADD_PROCESS_SET, {0, 2}));
  CHECK(!accepts(HVL_ADD_PROCESS_SET, {}));
  CHECK(!accepts(HVL_ADD_PROCESS_SET, {-1, 2}));
  CHECK(!accepts(HVL_ADD_PROCESS_SET, {2, 2}));
  CHECK(!accepts(HVL_ADD_PROCESS_SET, {0, int64_t{1} << 31}));
  CHECK(!accepts(HVL_REMOVE_PROCESS_SET, {}));
  CHECK(!accepts(HVL_REMOVE_PROCESS_SET, {1, 2}));
  CHECK(accepts(HVL_ALLREDUCE, {0, 0}));  // of two dimensions and of one
  CHECK(!accepts(HVL_ALLREDUCE, {0}));
  CHECK(!accepts(HVL_ALLREDUCE, {HVL_CHANNELS_LAST, 0}));
  CHECK(accepts(HVL_ALLREDUCE, {HVL_COLUMN_MAJOR, 0}));
  CHECK(!accepts(HVL_ALLREDUCE, {0, HVL_COLUMN_MAJOR}));
  Signature images = seed_signature(HVL_ALLREDUCE);
  images.tensors[0].shape = {5, 7, 1};
  for (const int64_t format : {-1, 0, 1, 2, 3}) {
    images.arguments = {format, 0};
    CHECK_EQ(decodes<Message>(encoded(request_of(images))), format >= HVL_ROW_MAJOR && format <= HVL_COLUMN_MAJOR);
  }
}

TEST(names_are_limited) {
  Signature signature = seed_signature(HVL_ALLREDUCE);
  signature.name = std::string(kMaxNameBytes, 'n');
  CHECK(decodes<Message>(encoded(request_of(signature))));
  signature.name += 'n';
  CHECK(!decodes<Message>(encoded(request_of(signature))));
  signature.name = std::string("a\0b\xff", 4);  // any bytes
  Message back;
  CHECK(decode_copy(encoded(request_of(signature)), &back).ok());
  CHECK(back.signature.name == signature.name);
}

TEST(counts_beyond_the_bytes_allocate_nothing) {
  const std::string ids = encoded(seed_messages()[0]);
  Message message;
  for (uint32_t count : {5u, 0x40000001u, 0xffffffffu}) {  // 4 * 0x40000001 is 4 in 32 bits
    CHECK(!decode_copy(with_count(ids, 1, count), &message).ok());
    CHECK(message.ids.capacity() < 100);
  }
  Signature signature = seed_signature(HVL_ALLREDUCE);
  signature.name = "";
  const std::string request = encoded(request_of(signature));
  CHECK(!decode_copy(with_count(request, kDtypeOffset - 4, 60000), &message).ok());
  CHECK(message.signature.tensors.capacity() < 100);
  Record record;
  CHECK(!decode_copy(with_count(encoded(seed_record(Record::Type::kShutdown)), 2, 0xffffffff), &record).ok());
  CHECK(record.text.capacity() < 100);
}

TEST(first_dimensions_must_add_up) {
  const Record seed = seed_records()[1];
  const auto accepts = [&](const std::vector<int64_t>& varying, uint32_t per_rank = 2) {
    Record record = seed;
    record.varying = varying;
    record.varying_per_rank = per_rank;
    return decodes<Record>(encoded(record));
  };
  CHECK(accepts({2, 1, 0, 1, 3, 2}));
  CHECK(accepts({5, 4}));
  CHECK(!accepts({}));
  CHECK(!accepts({5, 4}, 0));
  CHECK(!accepts({5, 4}, 1));           // of one of two tensors
  CHECK(!accepts({5, 4, 0}));           // no whole number of ranks
  CHECK(!accepts({2, 1, 0, 1, 4, 2}));  // 6 of 5 rows
  CHECK(!accepts({-1, 4, 6, 0}));
  CHECK(!accepts({std::numeric_limits<int64_t>::max(), 4, 6, 0}));
  Record scalar = seed;
  scalar.signature.tensors[0].shape = {};
  CHECK(!decodes<Record>(encoded(scalar)));
  Record allreduce = seed_records()[0];
  allreduce.varying = {5, 4};
  CHECK(!decodes<Record>(encoded(allreduce)));
}

TEST(splits_must_fit) {
  Record seed = seed_records()[5];
  REQUIRE(seed.signature.kind == HVL_ALLTOALL);
  const auto accepts = [&](const std::vector<int64_t>& varying) {
    seed.varying = varying;
    return decodes<Record>(encoded(seed));
  };
  // Of each of two ranks: the rows of two tensors, then two splits of the first and two of the second.
  CHECK(accepts({2, 1, 1, 1, 0, 1, 3, 3, 0, 2, 1, 2}));
  CHECK(accepts({2, 1, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0}));   // not all rows need to be sent
  CHECK(!accepts({2, 1, 1, 2, 0, 1, 3, 3, 0, 2, 1, 2}));  // 3 of 2 rows
  CHECK(!accepts({2, 1, 1, 1, 0, 2, 3, 3, 0, 2, 1, 2}));  // 2 of 1 row of the second tensor
  CHECK(!accepts({2, 1, -1, 1, 0, 1, 3, 3, 0, 2, 1, 2}));
  CHECK(!accepts({2, 1, 1, 1, 0, 1, 4, 3, 0, 2, 1, 2}));  // together 6 of 5 rows
  seed.varying_per_rank = 5;
  CHECK(!accepts({2, 1, 1, 1, 0, 3, 3, 0, 2, 1}));  // not as many splits for each tensor
}

TEST(factors_keep_their_bits) {
  Signature signature = seed_signature(HVL_ALLREDUCE);
  signature.prescale = std::numeric_limits<double>::quiet_NaN();
  signature.postscale = -0.0;
  const std::string bytes = encoded(request_of(signature));
  Message back;
  CHECK(decode_copy(bytes, &back).ok());
  CHECK(encoded(back) == bytes);
  CHECK(back.signature == signature);  // so that a rank with this factor still uses its id
  signature.prescale = 1;
  CHECK(back.signature != signature);
}
