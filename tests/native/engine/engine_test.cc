// Engines as the threads of one process, over memory that they share: negotiation and data plane from end to end.

#include <cstdlib>
#include <cstring>
#include <future>
#include <random>

#include "check.h"
#include "job_of_threads.h"

namespace hvl {
namespace {

void check_allreduce(Job& job, const std::string& name, size_t count) {
  job.on_all([&](int rank) {
    auto operation = make(name, HVL_ALLREDUCE, {{static_cast<int64_t>(count)}});
    for (int round = 0; round < 3; ++round) {
      std::vector<float> data(count + 1);
      for (size_t i = 0; i < count; ++i) data[i] = value(rank, i) + static_cast<float>(round);
      CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
      for (size_t i = 0; i < count; ++i) {
        float expected = 0;
        for (int other = 0; other < job.size(); ++other) expected += value(other, i) + static_cast<float>(round);
        CHECK_EQ(data[i], expected);
      }
    }
  });
}

TEST(allreduce_of_all_sizes) {
  for (int size : {1, 2, 3, 4, 7}) {
    Job job(size);
    for (size_t count : {0, 1, 17, 1009, 1024, 5003, 100003}) {
      check_allreduce(job, "tensor." + std::to_string(count), count);
    }
  }
}

TEST(allreduce_in_different_orders_and_many_at_once) {
  for (int size : {1, 2, 3, 4}) {
    EngineOptions options;
    options.fusion_threshold = 20000;
    options.cache_capacity = 50;
    Job job(size, options);
    constexpr int kTensors = 120;
    job.on_all([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank) + 1);
      for (int round = 0; round < 4; ++round) {
        std::vector<int> order;
        for (int t = 0; t < kTensors; ++t) order.push_back(t);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> data(kTensors);
        std::vector<int64_t> handles(kTensors);
        for (int t : order) {
          auto& tensor = data[static_cast<size_t>(t)];
          tensor.assign(static_cast<size_t>(t * 11 + 1), static_cast<float>(rank + t));
          auto operation = make("t" + std::to_string(t), HVL_ALLREDUCE, {{t * 11 + 1}});
          char* address = reinterpret_cast<char*>(tensor.data());
          handles[static_cast<size_t>(t)] = job.enqueue(rank, operation, {address}, {address});
        }
        for (int t : order) CHECK_EQ(job.wait(rank, handles[static_cast<size_t>(t)]).message(), "");
        for (int t = 0; t < kTensors; ++t) {
          float expected = static_cast<float>(size * t + size * (size - 1) / 2);
          for (float got : data[static_cast<size_t>(t)]) CHECK_EQ(got, expected);
        }
      }
    });
  }
}

TEST(broadcast_from_every_root) {
  for (int size : {1, 2, 3, 4}) {
    Job job(size);
    for (int root = 0; root < size; ++root) {
      job.on_all([&](int rank) {
        std::vector<float> data(9001, static_cast<float>(rank));
        auto operation = make("b", HVL_BROADCAST, {{9001}}, HVL_SUM, root);
        CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
        for (float got : data) CHECK_EQ(got, static_cast<float>(root));
      });
    }
  }
}

TEST(allgather_of_uneven_rows) {
  for (int size : {1, 2, 3, 4}) {
    Job job(size);
    for (int round = 0; round < 4; ++round) {
      job.on_all([&](int rank) {
        int64_t rows = (rank * 700 + round * (rank % 2)) % 1500;
        std::vector<float> data(static_cast<size_t>(rows * 3) + 1, static_cast<float>(rank));
        auto operation = make("g", HVL_ALLGATHER, {{rows, 3}});
        std::vector<hvl_output> outputs;
        int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<char*>(data.data())}, {});
        CHECK_EQ(job.wait(rank, handle, &outputs).message(), "");
        CHECK_EQ(outputs.size(), size_t{1});
        const float* got = static_cast<float*>(outputs[0].data);
        for (int other = 0; other < job.size(); ++other) {
          int64_t their_rows = (other * 700 + round * (other % 2)) % 1500;
          for (int64_t i = 0; i < their_rows * 3; ++i) CHECK_EQ(*got++, static_cast<float>(other));
        }
        CHECK_EQ(static_cast<int64_t>(reinterpret_cast<const char*>(got) - static_cast<char*>(outputs[0].data)),
                 outputs[0].num_bytes);
        free(outputs[0].data);
      });
    }
  }
}

// The calls of the callbacks of a request.
struct Told {
  std::vector<std::vector<int64_t>> outputs;
  bool has_memory = true;
  std::promise<hvl_status> completed;

  hvl_callbacks callbacks() {
    hvl_callbacks all{};
    all.context = this;
    all.done = [](void* context, int32_t status, const char*) {
      static_cast<Told*>(context)->completed.set_value(static_cast<hvl_status>(status));
    };
    all.allocate = [](void* context, int32_t index, const hvl_output* output) -> void* {
      auto* told = static_cast<Told*>(context);
      if (!told->has_memory) return nullptr;
      CHECK_EQ(static_cast<size_t>(index), told->outputs.size());
      CHECK_EQ(output->shape[0] * static_cast<int64_t>(size_of(static_cast<DataType>(output->dtype))),
               output->num_bytes);
      told->outputs.emplace_back(static_cast<size_t>(output->num_bytes) / sizeof(int64_t) + 1);
      return told->outputs.back().data();
    };
    return all;
  }
};

int64_t enqueue(Job& job, int rank, const std::shared_ptr<Operation>& operation, const void* data,
                const hvl_callbacks& callbacks) {
  auto request = std::make_unique<PendingRequest>();
  request->operation = operation;
  request->memory.input = static_cast<const char*>(data);
  request->callbacks = callbacks;
  int64_t handle = -1;
  CHECK_EQ(job.engine(rank).enqueue(std::move(request), &handle).message(), "");
  job.engine(rank).notify();
  return handle;
}

TEST(outputs_in_the_memory_of_the_caller) {
  for (int size : {1, 3}) {
    Job job(size);
    job.on_all([&](int rank) {
      const std::vector<float> data(6, static_cast<float>(rank));
      std::vector<float> expected;
      for (int other = 0; other < size; ++other) expected.insert(expected.end(), 6, static_cast<float>(other));
      Told gathered;
      CHECK_EQ(enqueue(job, rank, make("g", HVL_ALLGATHER, {{6}}), data.data(), gathered.callbacks()), 0);
      CHECK_EQ(gathered.completed.get_future().get(), HVL_OK);
      CHECK_EQ(gathered.outputs.size(), size_t{1});
      CHECK_EQ(memcmp(gathered.outputs[0].data(), expected.data(), expected.size() * sizeof(float)), 0);

      Told waited;  // the same without a function to call at the end
      hvl_callbacks callbacks = waited.callbacks();
      callbacks.done = nullptr;
      const int64_t handle = enqueue(job, rank, make("g", HVL_ALLGATHER, {{6}}), data.data(), callbacks);
      std::vector<hvl_output> none;
      CHECK_EQ(job.wait(rank, handle, &none).message(), "");
      CHECK_EQ(none.size(), size_t{0});
      CHECK_EQ(memcmp(waited.outputs[0].data(), expected.data(), expected.size() * sizeof(float)), 0);

      Told joined;
      enqueue(job, rank, make("j", HVL_JOIN, {}), nullptr, joined.callbacks());
      CHECK_EQ(joined.completed.get_future().get(), HVL_OK);
      CHECK_EQ(joined.outputs.size(), size_t{1});
      CHECK(joined.outputs[0][0] >= 0 && joined.outputs[0][0] < size);
    });
  }
}

TEST(outputs_that_nobody_takes_are_freed) {
  Job job(1);
  const float data = 1;
  Told told;
  hvl_callbacks callbacks = told.callbacks();
  callbacks.allocate = nullptr;
  enqueue(job, 0, make("g", HVL_ALLGATHER, {{1}}), &data, callbacks);
  CHECK_EQ(told.completed.get_future().get(), HVL_OK);  // the address sanitizer sees what is left
}

TEST(no_memory_of_the_caller_breaks_the_job) {
  Job job(2);
  job.on_all([&](int rank) {
    const float data = 1;
    Told told;
    told.has_memory = rank != 1;
    enqueue(job, rank, make("g", HVL_ALLGATHER, {{1}}), &data, told.callbacks());
    CHECK_EQ(told.completed.get_future().get(), HVL_JOB_BROKEN);
  });
}

TEST(a_mismatch_fails_everywhere_and_the_job_goes_on) {
  for (int size : {2, 3, 4}) {
    Job job(size);
    for (int round = 0; round < 2; ++round) {
      job.on_all([&](int rank) {
        std::vector<float> data(64);
        auto odd = make("m", HVL_ALLREDUCE, {{rank == 1 ? 32 : 64}});
        Status status = job.run(rank, odd, data.data());
        CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_MISMATCH));
        CHECK_HAS(status.message(), "'m'");
        CHECK_EQ(job.run(rank, make("m", HVL_ALLREDUCE, {{64}}), data.data()).message(), "");
      });
    }
  }
}

TEST(a_name_in_flight_is_refused) {
  Job job(2);
  std::vector<float> data(4);
  char* address = reinterpret_cast<char*>(data.data());
  auto operation = make("d", HVL_ALLREDUCE, {{4}});
  int64_t handle = job.enqueue(0, operation, {address}, {address});
  Status status;
  job.enqueue(0, operation, {address}, {address}, &status);
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_INVALID_ARGUMENT));
  std::vector<float> other(4);
  CHECK_EQ(job.run(1, operation, other.data()).message(), "");
  CHECK_EQ(job.wait(0, handle).message(), "");
}

std::shared_ptr<Operation> make_next(const std::string& name, const std::vector<Shape>& shapes, int32_t sequence = 1) {
  auto operation = make(name, HVL_ALLREDUCE, shapes);
  operation->sequence = sequence;
  return operation;
}

int64_t enqueue_in_place(Job* job, int rank, const std::shared_ptr<Operation>& operation, std::vector<float>* data) {
  char* address = reinterpret_cast<char*>(data->data());
  return job->enqueue(rank, operation, {address}, {address});
}

TEST(requests_of_a_sequence_wait_for_their_names) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, std::vector<int>{0, 0, 1}}) {
    EngineOptions options;
    options.hosts = hosts;
    Job job(3, options);
    job.on_all([&](int rank) {
      std::vector<std::vector<float>> data;
      for (size_t i = 0; i < 100; ++i) data.emplace_back(i % 2 == 0 ? 4 : 1000, static_cast<float>(i));
      std::vector<int64_t> handles;
      for (std::vector<float>& each : data) {
        const std::string name = each.size() == 4 || handles.size() % 3 == 0 ? "a" : "b";
        handles.push_back(enqueue_in_place(&job, rank, make_next(name, {{static_cast<int64_t>(each.size())}}), &each));
      }
      for (size_t i = 0; i < data.size(); ++i) {
        CHECK_EQ(job.wait(rank, handles[i]).message(), "");
        CHECK_EQ(data[i].back(), static_cast<float>(3 * i));
      }
    });
  }
}

TEST(a_sequence_fails_behind_a_request_about_which_the_ranks_disagree) {
  Job job(2);
  const std::string names[] = {"of.rank.0", "of.rank.1"};
  std::vector<std::vector<float>> own(2, std::vector<float>(8, 1.0f)), other = own;
  int64_t before[2];  // in flight until the other rank has it, too
  for (int rank : {0, 1})
    before[rank] = enqueue_in_place(&job, rank, make_next(names[rank], {{8}}), &own[static_cast<size_t>(rank)]);
  job.on_all([&](int rank) {
    std::vector<float> odd(8), even(8);
    const int64_t failing = enqueue_in_place(&job, rank, make_next("x", {{rank == 0 ? 8 : 4}}), &odd);
    const int64_t behind = enqueue_in_place(&job, rank, make_next("x", {{8}}), &even);
    const Status status = job.wait(rank, behind);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_MISMATCH));
    CHECK_HAS(status.message(), "'x' comes after that");
    CHECK_EQ(static_cast<int>(job.wait(rank, failing).code()), static_cast<int>(HVL_MISMATCH));
    CHECK_EQ(
        job.run(rank, make(names[1 - rank], HVL_ALLREDUCE, {{8}}), other[static_cast<size_t>(rank)].data()).message(),
        "");
    CHECK_EQ(job.wait(rank, before[rank]).message(), "");
    CHECK_EQ(own[static_cast<size_t>(rank)][7], 2.0f);
    CHECK_EQ(static_cast<int>(job.run(rank, make_next("x", {{8}}), even.data()).code()),
             static_cast<int>(HVL_MISMATCH));
    CHECK_EQ(job.run(rank, make_next("x", {{8}}, 2), even.data()).message(), "");
  });
}

TEST(a_name_may_be_in_flight_in_another_sequence) {
  Job job(2);
  job.on_all([&](int rank) {
    std::vector<std::vector<float>> data(4, std::vector<float>(4, 1.0f));
    std::vector<int64_t> handles;
    for (const int32_t sequence : {0, 1, 2, 1}) {
      handles.push_back(enqueue_in_place(&job, rank, make_next("o", {{4}}, sequence), &data[handles.size()]));
    }
    for (const int64_t handle : handles) CHECK_EQ(job.wait(rank, handle).message(), "");
  });
}

TEST(shutting_down_fails_requests_that_wait_for_their_names) {
  Job job(2);
  std::vector<float> data(4);
  std::vector<int64_t> handles;
  for (int i = 0; i < 3; ++i) handles.push_back(enqueue_in_place(&job, 0, make_next("s", {{4}}, 1 + i % 2), &data));
  job.engine(1).shut_down();
  for (const int64_t handle : handles) {
    CHECK_EQ(static_cast<int>(job.wait(0, handle).code()), static_cast<int>(HVL_SHUT_DOWN));
  }
}

TEST(shutting_down_fails_what_is_pending) {
  Job job(3);
  std::vector<float> data(4);
  char* address = reinterpret_cast<char*>(data.data());
  int64_t handle = job.enqueue(0, make("s", HVL_ALLREDUCE, {{4}}), {address}, {address});
  job.engine(2).shut_down("the disk is gone");
  Status status = job.wait(0, handle);
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_SHUT_DOWN));
  CHECK_HAS(status.message(), "rank 2 has shut the job down: the disk is gone. In flight here: ");
  job.enqueue(1, make("s", HVL_ALLREDUCE, {{4}}), {address}, {address}, &status);
  while (status.ok()) job.enqueue(1, make("late", HVL_ALLREDUCE, {{4}}), {address}, {address}, &status);
}

TEST(a_stall_ends_the_job_with_a_report) {
  EngineOptions options;
  options.stall_warning = 0;
  options.stall_shutdown = 1;
  Job job(2, options);
  std::vector<float> data(4);
  char* address = reinterpret_cast<char*>(data.data());
  int64_t handle = job.enqueue(1, make("only.one", HVL_ALLREDUCE, {{4}}), {address}, {address});
  Status status = job.wait(1, handle);
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_JOB_BROKEN));
  CHECK_HAS(status.message(), "only.one");
  CHECK_HAS(status.message(), "missing on ranks [0]");
}

TEST(a_group_whose_description_is_longer_than_the_rings) {
  Job job(3);
  job.on_all([&](int rank) {
    std::vector<Shape> shapes(12000, Shape{1, 1, 1, 1});
    std::vector<float> data(shapes.size(), static_cast<float>(rank));
    std::vector<char*> addresses;
    for (float& element : data) addresses.push_back(reinterpret_cast<char*>(&element));
    auto group = make("long.group", HVL_ALLREDUCE, shapes);
    for (int round = 0; round < 2; ++round) {
      int64_t handle = job.enqueue(rank, group, {addresses.begin(), addresses.end()}, addresses);
      CHECK_EQ(job.wait(rank, handle).message(), "");
    }
    for (float got : data) CHECK_EQ(got, 9.0f);  // 0 + 1 + 2 = 3, and once more
  });
}

TEST(many_new_names_at_once) {
  Job job(2);
  job.on_all([&](int rank) {
    std::vector<float> data(6000, static_cast<float>(rank + 1));
    std::vector<int64_t> handles;
    for (size_t i = 0; i < data.size(); ++i) {
      char* address = reinterpret_cast<char*>(&data[i]);
      std::string name = "a.rather.long.name.of.a.parameter.of.a.large.model." + std::to_string(i);
      handles.push_back(job.enqueue(rank, make(name, HVL_ALLREDUCE, {{1}}), {address}, {address}));
    }
    for (int64_t handle : handles) CHECK_EQ(job.wait(rank, handle).message(), "");
    for (float got : data) CHECK_EQ(got, 3.0f);
  });
}

TEST(reducescatter_of_uneven_rows) {
  for (int size : {1, 2, 3, 4, 7}) {
    Job job(size);
    for (int64_t rows : {0, 1, 3, 1009, 20011}) {
      job.on_all([&](int rank) {
        auto operation = make("scatter." + std::to_string(rows), HVL_REDUCESCATTER, {{rows, 3}});
        std::vector<float> input(static_cast<size_t>(rows) * 3 + 1);
        for (size_t i = 0; i < input.size(); ++i) input[i] = value(rank, i);
        int64_t begin = 0, mine = 0;
        for (int other = 0; other <= rank; ++other) {
          begin += mine;
          mine = rows / size + (other < rows % size ? 1 : 0);
        }
        std::vector<float> output(static_cast<size_t>(mine) * 3 + 1, -1.0f);
        int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<char*>(input.data())},
                                     {reinterpret_cast<char*>(output.data())});
        CHECK_EQ(job.wait(rank, handle).message(), "");
        for (size_t i = 0; i + 1 < output.size(); ++i) {
          float expected = 0;
          for (int other = 0; other < size; ++other) expected += value(other, static_cast<size_t>(begin) * 3 + i);
          CHECK_EQ(output[i], expected);
        }
        CHECK_EQ(output.back(), -1.0f);
      });
    }
  }
}

TEST(groups_and_barriers_mixed) {
  for (int size : {1, 2, 4}) {
    Job job(size);
    job.on_all([&](int rank) {
      auto barrier = make("barrier", HVL_BARRIER, {});
      auto group = make("group", HVL_ALLREDUCE, {{3}, {0}, {5000}}, HVL_MAX);
      for (int round = 0; round < 5; ++round) {
        std::vector<float> a(3, static_cast<float>(rank)), b, c(5000, static_cast<float>(-rank));
        std::vector<char*> addresses{reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data()),
                                     reinterpret_cast<char*>(c.data())};
        int64_t handle = job.enqueue(rank, group, {addresses.begin(), addresses.end()}, addresses);
        CHECK_EQ(job.wait(rank, job.enqueue(rank, barrier, {}, {})).message(), "");
        CHECK_EQ(job.wait(rank, handle).message(), "");
        for (float got : a) CHECK_EQ(got, static_cast<float>(size - 1));
        for (float got : c) CHECK_EQ(got, 0.0f);
      }
    });
  }
}

// Waits in small portions, so that the engine's work goes from thread to thread.
Status wait_impatiently(Job& job, int rank, int64_t handle, std::mt19937* random) {
  while (job.engine(rank).wait(&handle, 1, now_ns() + (*random)() % 100000) == HVL_IN_PROGRESS) {
  }
  return job.wait(rank, handle);
}

TEST(many_threads_of_each_rank_wait) {
  constexpr int kThreads = 3;
  for (bool overlap : {true, false}) {
    EngineOptions options;
    options.overlap = overlap;
    Job job(2, options);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads * job.size(); ++t) {
      threads.emplace_back([&job, rank = t % job.size(), name = "thread." + std::to_string(t / job.size())] {
        std::mt19937 random(static_cast<unsigned>(rank));
        auto operation = make(name, HVL_ALLREDUCE, {{3000}});
        for (int round = 0; round < 100; ++round) {
          std::vector<float> data(3000, static_cast<float>(rank + round));
          char* address = reinterpret_cast<char*>(data.data());
          int64_t handle = job.enqueue(rank, operation, {address}, {address});
          CHECK_EQ(wait_impatiently(job, rank, handle, &random).message(), "");
          for (float got : data) CHECK_EQ(got, static_cast<float>(2 * round + 1));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

// The first tensor of a batch completes on rank 1 while the batch goes on, and its callback keeps rank 1 there.
TEST(a_wait_ends_in_time_within_a_collective) {
  constexpr size_t kCount = 100000;
  EngineOptions options;
  options.overlap = false;  // so that both tensors make one batch
  Job job(2, options);
  std::promise<void> leave;
  std::shared_future<void> may_leave = leave.get_future().share();
  std::promise<void> reached;
  struct Stop {
    std::promise<void>* reached;
    std::shared_future<void> may_leave;
  } stop{&reached, may_leave};
  std::vector<std::vector<float>> small(2, std::vector<float>(4, 1.0f)), large(2, std::vector<float>(kCount, 1.0f));
  std::vector<int64_t> handles(2), small_handles(2);
  for (int rank : {0, 1}) {
    auto first = std::make_unique<PendingRequest>();
    first->operation = make("small", HVL_ALLREDUCE, {{4}});
    char* address = reinterpret_cast<char*>(small[static_cast<size_t>(rank)].data());
    first->memory = Memory{address, address};
    if (rank == 1) {
      first->callbacks.context = &stop;
      first->callbacks.done = [](void* context, int32_t, const char*) {
        auto* here = static_cast<Stop*>(context);
        here->reached->set_value();
        here->may_leave.wait();
      };
    }
    CHECK_EQ(job.engine(rank).enqueue(std::move(first), &small_handles[static_cast<size_t>(rank)]).message(), "");
    address = reinterpret_cast<char*>(large[static_cast<size_t>(rank)].data());
    auto operation = make("large", HVL_ALLREDUCE, {{static_cast<int64_t>(kCount)}});
    handles[static_cast<size_t>(rank)] = job.enqueue(rank, operation, {address}, {address});
  }
  std::thread other([&] { CHECK_EQ(job.wait(1, handles[1]).message(), ""); });
  CHECK_EQ(job.engine(0).wait(&small_handles[0], 1, now_ns() + kPatience), HVL_OK);
  reached.get_future().wait();
  CHECK_EQ(job.engine(0).wait(&handles[0], 1, now_ns() + 5 * kMillisecond), HVL_IN_PROGRESS);
  CHECK_EQ(job.engine(0).counters().batches.load(), 1);
  leave.set_value();
  CHECK_EQ(job.wait(0, handles[0]).message(), "");
  other.join();
  for (const auto& data : large) CHECK_EQ(data.back(), 2.0f);
}

TEST(a_rank_that_does_not_wait_holds_up_nobody) {
  EngineOptions options;
  options.overlap = false;
  Job job(3, options);
  std::vector<std::vector<float>> data(3, std::vector<float>(8, 1.0f));
  std::vector<int64_t> handles;
  for (int rank = 0; rank < 3; ++rank) {
    char* address = reinterpret_cast<char*>(data[static_cast<size_t>(rank)].data());
    handles.push_back(job.enqueue(rank, make("held.back", HVL_ALLREDUCE, {{8}}), {address}, {address}));
  }
  for (size_t rank : {1, 0, 2}) {  // no thread waits on the other two
    CHECK_EQ(job.wait(static_cast<int>(rank), handles[rank]).message(), "");
    for (float got : data[rank]) CHECK_EQ(got, 3.0f);
  }
}

}  // namespace
}  // namespace hvl
