// The reductions that NCCL runs, and between which ranks; and the messages for libraries that cannot be used.

#include <cmath>
#include <cstring>

#include "check.h"
#include "fake_gpu.h"
#include "nccl/nccl_api.h"
#include "nccl/nccl_plan.h"

namespace hvl {
namespace {

Reduction reduction(DataType dtype, ReduceOp op, int divisor = 1, double prescale = 1.0, double postscale = 1.0) {
  return {dtype, op, prescale, postscale, divisor};
}

bool does(const Reduction& asked, NcclDataType dtype, NcclRedOp op, double factor = 1.0, size_t size = 4) {
  const NcclReduction plan = plan_reduction(asked, size);
  return plan.why_not == nullptr && plan.dtype == dtype && plan.op == op && plan.factor == factor;
}

bool does_not(const Reduction& asked, size_t size = 4) { return plan_reduction(asked, size).why_not != nullptr; }

TEST(sums_and_averages) {
  CHECK(does(reduction(HVL_FLOAT32, HVL_SUM), kNcclFloat32, kNcclSum));
  CHECK(does(reduction(HVL_BFLOAT16, HVL_SUM), kNcclBfloat16, kNcclSum));
  CHECK(does(reduction(HVL_INT64, HVL_SUM), kNcclInt64, kNcclSum));
  CHECK(does(reduction(HVL_FLOAT16, HVL_AVERAGE, 4), kNcclFloat16, kNcclAvg));
  CHECK(does(reduction(HVL_FLOAT32, HVL_AVERAGE, 4, 0.25, 4.0), kNcclFloat32, kNcclAvg));
  CHECK(does_not(reduction(HVL_INT32, HVL_AVERAGE, 4)));
  CHECK(does(reduction(HVL_INT32, HVL_AVERAGE, 1), kNcclInt32, kNcclSum, 1.0, 1));
  CHECK(does(reduction(HVL_FLOAT32, HVL_AVERAGE, 1), kNcclFloat32, kNcclSum, 1.0, 1));
  CHECK(does(reduction(HVL_FLOAT16, HVL_AVERAGE, 1, 0.5, 2.0), kNcclFloat16, kNcclSum, 1.0, 1));
  CHECK(does(reduction(HVL_FLOAT16, HVL_AVERAGE, 2), kNcclFloat16, kNcclAvg, 1.0, 2));
  // By another number than that of the team.
  CHECK(does(reduction(HVL_FLOAT64, HVL_AVERAGE, 5), kNcclFloat64, kNcclSum, 1.0 / 5));
}

TEST(factors) {
  CHECK(does(reduction(HVL_FLOAT32, HVL_SUM, 1, 0.1), kNcclFloat32, kNcclSum, 0.1));
  CHECK(does(reduction(HVL_FLOAT32, HVL_AVERAGE, 4, 0.5, 3.0), kNcclFloat32, kNcclSum, 0.375));
  CHECK(does(reduction(HVL_FLOAT16, HVL_SUM, 1, 0.5), kNcclFloat16, kNcclSum, 0.5));
  // 1 / 49 * 49 is not 1.
  CHECK(does(reduction(HVL_FLOAT16, HVL_AVERAGE, 4, 1.0 / 49, 49.0), kNcclFloat16, kNcclAvg));
  CHECK(does(reduction(HVL_BFLOAT16, HVL_SUM, 1, 1.0 / 49, 49.0), kNcclBfloat16, kNcclSum));
  CHECK(does_not(reduction(HVL_FLOAT16, HVL_SUM, 1, 1.0 + 1e-12)));
  CHECK(does_not(reduction(HVL_FLOAT16, HVL_SUM, 1, 0.1)));
  CHECK(does_not(reduction(HVL_BFLOAT16, HVL_SUM, 1, 257.0)));
  CHECK(does_not(reduction(HVL_FLOAT16, HVL_SUM, 1, 1e9)));
  CHECK(does_not(reduction(HVL_FLOAT16, HVL_SUM, 1, std::nan(""))));
  CHECK(does_not(reduction(HVL_INT32, HVL_SUM, 1, 2.0)));
  CHECK(does_not(reduction(HVL_INT32, HVL_SUM, 1, 2.0, 0.5)));
  CHECK(does_not(reduction(HVL_FLOAT32, HVL_MAX, 1, -1.0)));
  CHECK(does_not(reduction(HVL_FLOAT32, HVL_PRODUCT, 1, 2.0)));
}

TEST(other_operations) {
  CHECK(does(reduction(HVL_FLOAT64, HVL_MIN), kNcclFloat64, kNcclMin));
  CHECK(does(reduction(HVL_UINT8, HVL_MAX), kNcclUint8, kNcclMax));
  CHECK(does(reduction(HVL_INT8, HVL_PRODUCT), kNcclInt8, kNcclProd));
  CHECK(does(reduction(HVL_BOOL, HVL_SUM), kNcclUint8, kNcclMax));
  CHECK(does(reduction(HVL_BOOL, HVL_MAX), kNcclUint8, kNcclMax));
  CHECK(does(reduction(HVL_BOOL, HVL_PRODUCT), kNcclUint8, kNcclMin));
  CHECK(does(reduction(HVL_BOOL, HVL_MIN), kNcclUint8, kNcclMin));
  CHECK(does_not(reduction(HVL_INT16, HVL_SUM)));
  CHECK(does_not(reduction(HVL_UINT16, HVL_MAX)));
  CHECK(does_not(reduction(HVL_FLOAT8_E4M3FN, HVL_SUM)));
  CHECK(does_not(reduction(HVL_FLOAT8_E5M2, HVL_AVERAGE, 4)));
}

std::vector<Introduction> members(size_t count) {
  std::vector<Introduction> made(count);
  for (size_t place = 0; place < count; ++place) {
    made[place] = Introduction{};
    made[place].gpu.bytes[0] = static_cast<char>(place);
    made[place].nccl_version = 22703;
  }
  return made;
}

TEST(who_uses_nccl) {
  const std::vector<int> ranks = {0, 4, 7};
  CHECK(choose_transport(members(3), ranks).uses_nccl);
  auto told = members(3);
  told[1].operations = static_cast<int32_t>(GpuOperations::kStaging);
  CHECK_EQ(choose_transport(told, ranks).reason, "rank 4 is told not to use NCCL");
  auto without = members(3);
  without[2].nccl_version = 0;
  strcpy(without[2].why_no_nccl, "it is not there");
  CHECK_EQ(choose_transport(without, ranks).reason, "rank 7 cannot use NCCL: it is not there");
  auto differ = members(3);
  differ[1].nccl_version = 21903;
  CHECK_EQ(choose_transport(differ, ranks).reason, "rank 0 has version 22703 of NCCL and rank 4 21903");
  auto share = members(3);
  share[2].gpu = share[1].gpu;
  CHECK_EQ(choose_transport(share, ranks).reason, "rank 4 and rank 7 share a GPU, which NCCL does not allow");
  auto unterminated = without;
  memset(unterminated[2].why_no_nccl, 'x', sizeof unterminated[2].why_no_nccl);
  CHECK_EQ(choose_transport(unterminated, ranks).reason.size(), 24 + sizeof unterminated[2].why_no_nccl);
}

TEST(ranks_that_share_a_gpu_while_others_are_free_are_advised) {
  const std::vector<int> ranks = {0, 1, 2, 3};
  auto sharing = members(4);  // of two hosts, as 2 and 3 are
  sharing[1].gpu = sharing[0].gpu;
  sharing[3].gpu = sharing[2].gpu;
  std::vector<CudaUuid> visible(2);
  for (size_t mine : {0, 2}) {
    visible[1] = sharing[mine].gpu;
    visible[0].bytes[0] = 100;
    const std::string advice = advise_on_placement(sharing, ranks, mine, visible);
    CHECK_EQ(advice.rfind(mine == 0 ? "ranks 0, 1 share a GPU, and nobody uses 1 of the 2" : "ranks 2, 3 share", 0), 0);
    CHECK_HAS(advice, "torch.cuda.set_device(hvd.local_rank())");
    CHECK_HAS(advice, "hvdrun --gpus-per-rank 1");
    CHECK_EQ(advise_on_placement(sharing, ranks, mine + 1, visible), "");                       // said already
    CHECK_EQ(advise_on_placement(sharing, ranks, mine, {sharing[0].gpu}), "");                  // there is no other one
    CHECK_EQ(advise_on_placement(sharing, ranks, mine, {sharing[0].gpu, sharing[2].gpu}), "");  // all are used
  }
  CHECK_EQ(advise_on_placement(members(4), ranks, 0, visible), "");
}

TEST(libraries) {
  fake_gpu::reset(2);
  const hvl_gpu_libraries found = find_gpu_libraries(FAKE_GPU, FAKE_GPU, true);
  CHECK_EQ(found.cuda_version, 12080);
  CHECK_EQ(found.nccl_version, 22703);
  CHECK_EQ(found.num_gpus, 2);
  CHECK_EQ(std::string(found.why_no_cuda) + found.why_no_nccl, "");
  const hvl_gpu_libraries nowhere = find_gpu_libraries("/nowhere/libcuda.so.1", "libm.so.6", true);
  CHECK_EQ(nowhere.cuda_version, 0);
  CHECK_EQ(nowhere.nccl_version, 0);
  CHECK_EQ(std::string(nowhere.why_no_cuda).rfind("/nowhere/libcuda.so.1 cannot be opened: ", 0), 0);
  CHECK_EQ(std::string(nowhere.why_no_nccl),
           "libm.so.6 has no function ncclGetVersion: it is too old, or another library");
}

}  // namespace
}  // namespace hvl
