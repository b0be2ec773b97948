// The rules that choose a transport, and that tensors with different transports are in different batches.

#include "negotiate/routes.h"

#include "check.h"
#include "coordinator_driver.h"

namespace hvl {
namespace {

const Routes kSmallOnes({{HVL_CPU, HVL_ALLREDUCE, 64, HVL_EXTERNAL},
                         {HVL_CPU, HVL_ALLREDUCE, 256, HVL_BY_ENGINE},
                         {HVL_CPU, HVL_ALLREDUCE, INT64_MAX, HVL_EXTERNAL},
                         {HVL_CUDA, HVL_BROADCAST, INT64_MAX, HVL_STAGING}});

TEST(the_first_rule_that_fits_counts) {
  CHECK_EQ(kSmallOnes.find(allreduce_of("x", {15})), HVL_EXTERNAL);
  CHECK_EQ(kSmallOnes.find(allreduce_of("x", {16})), HVL_BY_ENGINE);
  CHECK_EQ(kSmallOnes.find(allreduce_of("x", {63})), HVL_BY_ENGINE);
  CHECK_EQ(kSmallOnes.find(allreduce_of("x", {64})), HVL_EXTERNAL);
  CHECK_EQ(kSmallOnes.find(allreduce_of("x", {0})), HVL_EXTERNAL);
  CHECK_EQ(kSmallOnes.find(allgather_of("x", {4})), HVL_BY_ENGINE);
  CHECK_EQ(kSmallOnes.find(barrier_of("x")), HVL_BY_ENGINE);
  Signature broadcast = broadcast_of("x", 0);
  CHECK_EQ(kSmallOnes.find(broadcast), HVL_BY_ENGINE);
  broadcast.device = HVL_CUDA;
  CHECK_EQ(kSmallOnes.find(broadcast), HVL_STAGING);
  CHECK(kSmallOnes.name(HVL_STAGING) && !kSmallOnes.name(HVL_NCCL));
  CHECK_EQ(Routes().find(allreduce_of("x", {15})), HVL_BY_ENGINE);
}

TEST(all_tensors_of_a_group_count_together) {
  Signature group = allreduce_of("x", {8});
  group.tensors.push_back(group.tensors.front());
  CHECK_EQ(kSmallOnes.find(group), HVL_BY_ENGINE);
}

TEST(a_batch_has_one_transport) {
  CoordinatorOptions options = options_of(2);
  const auto request = [](CoordinatorDriver* driver) {
    for (const int64_t size : {4, 20, 5, 21, 100}) {
      driver->request_all(allreduce_of(std::to_string(size), {size}));
    }
    return driver->decide();
  };
  const std::string defined = "define 1 4; define 2 20; define 3 5; define 4 21; define 5 100; ";
  CoordinatorDriver without(options);
  CHECK_EQ(request(&without), defined + "execute 1 2 3 4 5");
  options.routes = kSmallOnes;
  CoordinatorDriver with(options);
  CHECK_EQ(request(&with), defined + "execute 1 3 5; execute 2 4");
}

TEST(transports_that_the_engine_has) {
  for (int kind = HVL_MESSAGE; kind < kNumKinds; ++kind) {
    const bool moves = kind != HVL_MESSAGE && has_tensors(static_cast<Kind>(kind));
    for (int32_t transport : {HVL_SHARED_MEMORY, HVL_TCP}) {
      CHECK(implements(transport, kind, HVL_CPU));
      CHECK(!implements(transport, kind, HVL_CUDA));
    }
    CHECK_EQ(implements(HVL_EXTERNAL, kind, HVL_CPU), moves);
    CHECK(!implements(HVL_EXTERNAL, kind, HVL_CUDA));
    for (int32_t transport : {HVL_NCCL, HVL_STAGING}) {
      CHECK_EQ(implements(transport, kind, HVL_CUDA), moves);
      CHECK(!implements(transport, kind, HVL_CPU));
    }
  }
  CHECK(!implements(HVL_BY_ENGINE, HVL_ALLREDUCE, HVL_CPU) && !implements(99, HVL_ALLREDUCE, HVL_CPU));
  CHECK(!implements(HVL_TCP, kNumKinds, HVL_CPU) && !implements(HVL_TCP, -2, HVL_CPU));
}

}  // namespace
}  // namespace hvl
