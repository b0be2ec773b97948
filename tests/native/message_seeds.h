// Valid messages and records, one of each shape that the wire knows.
#pragma once

#include <string>
#include <vector>

#include "negotiate/message.h"

constexpr hvl::Kind kSeedKinds[] = {HVL_ALLREDUCE,          HVL_ALLGATHER, HVL_BROADCAST, HVL_BARRIER,
                                    HVL_REDUCESCATTER,      HVL_ALLTOALL,  HVL_JOIN,      HVL_ADD_PROCESS_SET,
                                    HVL_REMOVE_PROCESS_SET, HVL_GATHER,    HVL_SCATTER,   HVL_REDUCE};

inline hvl::Signature seed_signature(hvl::Kind kind) {
  hvl::Signature signature;
  signature.name = "allreduce.layer1.0.weight";
  signature.kind = kind;
  signature.root = hvl::has_root(kind) ? 3 : -1;
  signature.prescale = 0.5;
  signature.postscale = 1.0 / 3;
  if (hvl::has_tensors(kind)) signature.tensors = {{HVL_FLOAT32, {5, 7}}, {HVL_BFLOAT16, {4}}};
  if (kind == HVL_ALLTOALL) signature.arguments = {1, 3, 4, 0};
  if (kind == HVL_ADD_PROCESS_SET) signature.arguments = {1, 3};
  if (kind == HVL_REMOVE_PROCESS_SET) signature.arguments = {2};
  return signature;
}

// The same for ranks 2, 3 and 7 together; and allgathers and alltoalls in which each of them has other rows.
inline std::vector<hvl::Message> seeds_for_many_ranks(std::vector<hvl::Message> seeds) {
  for (hvl::Message& seed : seeds) {
    seed.ranks = hvl::RankSet({2, 3, 7});
    seed.latest = 3;
    seed.age = 1500;
    seed.spread = 25;
  }
  const size_t count = seeds.size();
  for (size_t i = 0; i < count; ++i) {
    if (seeds[i].type != hvl::Message::Type::kRequest || !hvl::allocates(seeds[i].signature.kind)) continue;
    seeds.push_back(seeds[i]);
    hvl::take_varying(&seeds.back().signature);
    const bool splits = seeds[i].signature.kind == HVL_ALLTOALL;
    if (splits) seeds.back().varying = {2, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 3, 3, 0, 2, 1, 2};
    if (!splits) seeds.back().varying = {2, 1, 0, 0, 5, 1};
  }
  return seeds;
}

inline std::vector<hvl::Message> seed_messages() {
  std::vector<hvl::Message> seeds;
  hvl::Message message;
  message.ids = {1, 2, 3, 0xfffffffe};
  seeds.push_back(message);
  seeds.push_back(hvl::Message());  // no ids
  for (hvl::Kind kind : kSeedKinds) {
    message = hvl::Message();
    message.type = hvl::Message::Type::kRequest;
    message.signature = seed_signature(kind);
    seeds.push_back(message);
  }
  message.signature = hvl::Signature();
  message.signature.op = HVL_MAX;
  message.signature.device = HVL_CUDA;
  message.signature.name = "";
  message.signature.tensors = {{HVL_BOOL, {}}, {HVL_INT64, {0, 9}}, {HVL_UINT8, {1, 2, 3, 4, 5, 6, 7, 8}}};
  seeds.push_back(message);
  message.signature.arguments = {HVL_ROW_MAJOR, HVL_ROW_MAJOR, HVL_CHANNELS_LAST};
  seeds.push_back(message);
  message = hvl::Message();
  message.type = hvl::Message::Type::kShutdown;
  message.text = "the script is at its end";
  seeds.push_back(message);
  for (const hvl::Message& seed : seeds_for_many_ranks(seeds)) seeds.push_back(seed);
  return seeds;
}

inline std::vector<hvl::Record> seed_records() {
  std::vector<hvl::Record> seeds;
  for (hvl::Kind kind : kSeedKinds) {
    hvl::Record record;
    record.type = hvl::Record::Type::kDefine;
    record.id = 77;
    record.signature = seed_signature(kind);
    if (kind == HVL_ALLGATHER || kind == HVL_GATHER) {
      record.varying = {2, 1, 0, 1, 3, 2};
      record.varying_per_rank = 2;
    }
    if (kind == HVL_ALLTOALL) {
      record.signature.arguments.clear();
      record.varying = {2, 1, 1, 1, 0, 1, 3, 3, 0, 2, 1, 2};
      record.varying_per_rank = 6;
    }
    seeds.push_back(record);
  }
  hvl::Record record = seeds.back();
  record.replaces = 75;
  record.absent = {0, 2};
  seeds.push_back(record);
  record = hvl::Record();
  record.type = hvl::Record::Type::kExecute;
  record.ids = {9, 8, 7};
  seeds.push_back(record);
  record.absent = {1, 3};
  record.last_joined = 2;
  seeds.push_back(record);
  record.type = hvl::Record::Type::kEvict;
  seeds.push_back(record);
  record = hvl::Record();
  record.type = hvl::Record::Type::kError;
  record.signature.name = "grad.3";
  record.signature.process_set = 2;
  record.status = HVL_MISMATCH;
  record.absent = {3};
  record.text = "Mismatched shapes for allreduce 'grad.3'";
  seeds.push_back(record);
  record = hvl::Record();
  record.type = hvl::Record::Type::kShutdown;
  record.status = HVL_JOB_BROKEN;
  record.text = "rank 1 is lost";
  seeds.push_back(record);
  return seeds;
}

template <typename T>
std::string encoded(const T& value) {
  std::string bytes;
  hvl::encode(value, &bytes);
  return bytes;
}
