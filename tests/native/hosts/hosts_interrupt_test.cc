// The data plane of several hosts without an engine: a collective that is interrupted wherever it would sleep goes on
// from there, and gives what it gives otherwise.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/engine_context.h"
#include "hosts_job.h"

namespace hvl {
namespace {

// The objects of one rank.
struct Rank {
  EngineOptions options;
  std::shared_ptr<HostMemory> memory;
  std::unique_ptr<Poller> poller;
  std::unique_ptr<Waiter> waiter;
  std::unique_ptr<DataPlane> plane;
  TeamPtr all;
  uint64_t num_collectives = 0;
  int num_interruptions = 0;
  const std::function<bool()> never = [] { return false; };

  // Calls call() until it is done. Every wait for others is over as soon as it begins.
  template <typename Call>
  void run(Call&& call) {
    plane->begin(all, ++num_collectives);
    Status status(HVL_IN_PROGRESS, "");
    while (status.code() == HVL_IN_PROGRESS) {
      waiter->take_turn(WaitingParty::kWaitingThread, 0, &never);
      status = call();
      num_interruptions += status.code() == HVL_IN_PROGRESS ? 1 : 0;
    }
    CHECK_EQ(status.message(), "");
  }
};

class Planes {
 public:
  Planes(const std::vector<int>& hosts, const Wiring& wiring) : size_(static_cast<int>(hosts.size())) {
    EngineOptions options = on_hosts(hosts);
    options.size = size_;
    const Connections connections(options, wiring);
    std::vector<std::shared_ptr<HostMemory>> memories;
    for (int rank = 0; rank < size_; ++rank) {
      options.rank = rank;
      options.transport = connections.transport_of(rank);
      options.wakeup_fd = connections.wakeup_fd(rank);
      const std::vector<int> local_ranks = options.local_ranks();
      const auto place = std::find(local_ranks.begin(), local_ranks.end(), rank) - local_ranks.begin();
      options.local_rank = static_cast<int>(place);
      const size_t host = static_cast<size_t>(hosts[static_cast<size_t>(rank)]);
      if (host == memories.size()) {
        memories.push_back(HostMemory::anonymous(HostShape{static_cast<int>(local_ranks.size()), 4096, 4}));
        REQUIRE(memories.back()->set_pipes(connections.wakeup_fds_of(hosts, static_cast<int>(host))).ok());
      }
      auto each = std::make_unique<Rank>();
      each->options = options;
      each->memory = memories[host];
      each->poller = std::make_unique<Poller>();
      REQUIRE(each->poller->open(options.wakeup_fd).ok());
      WaiterOptions waiter;
      waiter.local_rank = options.local_rank;
      waiter.ranks = local_ranks;
      waiter.poller = each->poller.get();
      each->waiter = std::make_unique<Waiter>(each->memory, waiter);
      each->plane = make_data_plane(options, each->memory, each->waiter.get());
      std::vector<int> all;
      for (int other = 0; other < size_; ++other) all.push_back(other);
      each->all = std::make_shared<Team>(all, rank);
      ranks_.push_back(std::move(each));
    }
  }

  int size() const { return size_; }

  // Returns how often ranks were interrupted.
  int on_all(const std::function<void(Rank&, int)>& function) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back([&, rank] { function(*ranks_[static_cast<size_t>(rank)], rank); });
    }
    int num_interruptions = 0;
    for (int rank = 0; rank < size_; ++rank) {
      threads[static_cast<size_t>(rank)].join();
      num_interruptions += ranks_[static_cast<size_t>(rank)]->num_interruptions;
    }
    return num_interruptions;
  }

 private:
  const int size_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Calls function(planes) for places of all kinds, with one stream for each pair, with three, which are sealed, and with
// two in memory. It returns how often ranks were interrupted: on this or that place perhaps never.
template <typename Function>
void on_all_planes(Function&& function) {
  int num_interruptions = 0;
  Wiring sealed;
  sealed.num_streams = 3;
  sealed.seals_data = true;
  for (const std::vector<int>& hosts : kPlaces) {
    for (const Wiring& wiring : {Wiring(), sealed, in_memory(2)}) {
      Planes planes(hosts, wiring);
      num_interruptions += function(planes);
    }
  }
  CHECK(num_interruptions > 0);
}

float sum_of(int size, size_t index) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(rank, index);
  return sum;
}

const FinalBytes kNobodyAsks = [](uint64_t) {};

constexpr int kEveryRank = -1;

// `root`: the only rank that gets the result; or kEveryRank.
void check_allreduce(const std::vector<Reduction>& reductions, size_t count, int root = kEveryRank) {
  on_all_planes([&](Planes& planes) {
    return planes.on_all([&](Rank& rank, int number) {
      for (int round = 0; round < 2; ++round) {
        Batch batch;
        std::vector<std::vector<float>> floats(reductions.size(), std::vector<float>(count));
        std::vector<std::vector<int32_t>> integers(reductions.size(), std::vector<int32_t>(count));
        for (size_t t = 0; t < reductions.size(); ++t) {
          for (size_t i = 0; i < count; ++i) {
            floats[t][i] = value(number, i);
            integers[t][i] = static_cast<int32_t>(value(number, i));
          }
          char* data = reductions[t].dtype == HVL_FLOAT32 ? reinterpret_cast<char*>(floats[t].data())
                                                          : reinterpret_cast<char*>(integers[t].data());
          Reduction reduction = reductions[t];
          if (reduction.op == HVL_AVERAGE) reduction.divisor = planes.size();
          batch.add(data, data, count * 4, reduction);
        }
        uint64_t num_final = 0;
        const FinalBytes final_bytes = [&](uint64_t num_bytes) {
          CHECK(num_bytes >= num_final);
          num_final = num_bytes;
        };
        const bool gets_result = root == kEveryRank || root == number;
        rank.run([&] {
          return root == kEveryRank ? rank.plane->allreduce(batch, final_bytes)
                                    : rank.plane->reduce_to(batch, root, final_bytes);
        });
        CHECK(root != kEveryRank || num_final == batch.num_bytes());
        size_t num_wrong = 0;
        for (size_t t = 0; t < reductions.size(); ++t) {
          for (size_t i = 0; i < count; ++i) {
            const float sum = sum_of(planes.size(), i);
            const float real = reductions[t].dtype == HVL_FLOAT32 && gets_result ? sum : value(number, i);
            const int32_t mean = reductions[t].dtype == HVL_INT32 && gets_result
                                     ? static_cast<int32_t>(sum) / planes.size()
                                     : static_cast<int32_t>(value(number, i));
            num_wrong += floats[t][i] == real && integers[t][i] == mean ? 0 : 1;
          }
        }
        CHECK_EQ(num_wrong, size_t{0});
      }
    });
  });
}

const Reduction kSum;
const Reduction kAverageOfIntegers = {HVL_INT32, HVL_AVERAGE, 1.0, 1.0, 1};

TEST(a_small_allreduce) { check_allreduce({kSum}, 500); }
TEST(an_allreduce_of_many_chunks) { check_allreduce({kSum, kSum}, 7001); }
TEST(a_small_reduce) { check_allreduce({kSum}, 500, 1); }
TEST(a_reduce_of_many_chunks) { check_allreduce({kSum, kSum}, 7001, 0); }
TEST(a_reduce_of_which_a_part_is_exact) { check_allreduce({kSum, kAverageOfIntegers}, 5003, 1); }
TEST(an_allreduce_that_is_exact) { check_allreduce({kAverageOfIntegers}, 5003); }
TEST(an_allreduce_of_which_a_part_is_exact) { check_allreduce({kSum, kAverageOfIntegers, kSum}, 5003); }

TEST(broadcasts) {
  on_all_planes([](Planes& planes) {
    constexpr size_t kCount = 100003;
    return planes.on_all([&](Rank& rank, int number) {
      for (int root : {0, planes.size() - 1}) {
        std::vector<float> data(kCount);
        for (size_t i = 0; i < kCount; ++i) data[i] = value(number, i);
        Batch batch;
        char* bytes = reinterpret_cast<char*>(data.data());
        batch.add(bytes, bytes, 400, Reduction());
        batch.add(bytes + 400, bytes + 400, kCount * 4 - 400, Reduction());
        rank.run([&] { return rank.plane->broadcast(batch, root, kNobodyAsks); });
        size_t num_wrong = 0;
        for (size_t i = 0; i < kCount; ++i) num_wrong += data[i] == value(root, i) ? 0 : 1;
        CHECK_EQ(num_wrong, size_t{0});
      }
    });
  });
}

TEST(allgathers) {
  on_all_planes([](Planes& planes) {
    const auto length_of = [](int rank) { return static_cast<size_t>(rank * 3001 % 7000); };
    return planes.on_all([&](Rank& rank, int number) {
      for (int round = 0; round < 2; ++round) {
        std::vector<float> input;
        for (size_t i = 0; i < length_of(number); ++i) input.push_back(value(number, i));
        std::vector<std::vector<float>> outputs;
        for (int other = 0; other < planes.size(); ++other) outputs.emplace_back(length_of(other));
        Gather gather{reinterpret_cast<const char*>(input.data()), {}};
        for (auto& output : outputs)
          gather.blocks.push_back({reinterpret_cast<char*>(output.data()), output.size() * 4});
        rank.run([&] { return rank.plane->allgather(gather); });
        size_t num_wrong = 0;
        for (int other = 0; other < planes.size(); ++other) {
          const auto& output = outputs[static_cast<size_t>(other)];
          for (size_t i = 0; i < output.size(); ++i) num_wrong += output[i] == value(other, i) ? 0 : 1;
        }
        CHECK_EQ(num_wrong, size_t{0});
      }
    });
  });
}

TEST(alltoalls) {
  on_all_planes([](Planes& planes) {
    const auto length_of = [](int from, int to) { return static_cast<size_t>((from * 2003 + to * 1009) % 5000); };
    return planes.on_all([&](Rank& rank, int number) {
      for (int round = 0; round < 2; ++round) {
        std::vector<std::vector<float>> sent, received;
        Exchange exchange{{}, {}, 0};
        for (int other = 0; other < planes.size(); ++other) {
          sent.emplace_back(length_of(number, other), value(number, static_cast<size_t>(other)));
          received.emplace_back(length_of(other, number));
          for (int to = 0; to < planes.size(); ++to) {
            exchange.longest = std::max<uint64_t>(exchange.longest, length_of(other, to) * 4);
          }
        }
        for (auto& block : sent)
          exchange.sent.push_back({reinterpret_cast<const char*>(block.data()), block.size() * 4});
        for (auto& block : received) {
          exchange.received.push_back({reinterpret_cast<char*>(block.data()), block.size() * 4});
        }
        rank.run([&] { return rank.plane->alltoall(exchange); });
        for (int other = 0; other < planes.size(); ++other) {
          const auto& block = received[static_cast<size_t>(other)];
          const float expected = value(other, static_cast<size_t>(number));
          CHECK_EQ(static_cast<size_t>(std::count(block.begin(), block.end(), expected)), block.size());
        }
      }
    });
  });
}

void check_reducescatter(bool is_exact) {
  on_all_planes([&](Planes& planes) {
    return planes.on_all([&](Rank& rank, int number) {
      // Blocks of different lengths, the first of nothing.
      const auto length_of = [](int place) { return static_cast<size_t>(place * 1501); };
      for (int round = 0; round < 2; ++round) {
        std::vector<std::vector<float>> floats;
        std::vector<std::vector<int32_t>> integers;
        Scatter scatter{{}, nullptr, kSum};
        for (int place = 0; place < planes.size(); ++place) {
          floats.emplace_back();
          for (size_t i = 0; i < length_of(place); ++i) floats.back().push_back(value(number, i));
          integers.emplace_back(floats.back().begin(), floats.back().end());
          const char* data = is_exact ? reinterpret_cast<const char*>(integers.back().data())
                                      : reinterpret_cast<const char*>(floats.back().data());
          scatter.blocks.push_back({data, length_of(place) * 4});
        }
        std::vector<float> floats_out(length_of(number));
        std::vector<int32_t> integers_out(length_of(number));
        scatter.output =
            is_exact ? reinterpret_cast<char*>(integers_out.data()) : reinterpret_cast<char*>(floats_out.data());
        if (is_exact) scatter.reduction = kAverageOfIntegers;
        if (is_exact) scatter.reduction.divisor = planes.size();
        rank.run([&] { return rank.plane->reducescatter(scatter); });
        size_t num_wrong = 0;
        for (size_t i = 0; i < length_of(number); ++i) {
          const float sum = sum_of(planes.size(), i);
          num_wrong += is_exact ? integers_out[i] != static_cast<int32_t>(sum) / planes.size() : floats_out[i] != sum;
        }
        CHECK_EQ(num_wrong, size_t{0});
      }
    });
  });
}

TEST(a_reducescatter) { check_reducescatter(false); }
TEST(a_reducescatter_that_is_exact) { check_reducescatter(true); }

}  // namespace
}  // namespace hvl
