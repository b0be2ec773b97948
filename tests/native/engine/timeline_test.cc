// The timeline is started and stopped while collectives run.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "check.h"
#include "job_of_threads.h"

namespace hvl {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(what_began_has_ended_in_a_file_that_is_whole) {
  char folder[] = "/tmp/timeline_test.XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/timeline.json";
  Job job(2);
  job.on_all([&](int rank) {
    const auto operation = make("a", HVL_ALLREDUCE, {{10}});
    std::vector<float> data(10);
    for (int round = 0; round < 50; ++round) {
      if (rank == 1) CHECK(job.engine(rank).timeline().start(path, round % 2 == 0).ok());
      for (int step = 0; step < 5; ++step) CHECK(job.run(rank, operation, data.data()).ok());
      if (rank == 0) continue;
      job.engine(rank).timeline().stop();
      const std::string text = content_of(path);
      CHECK_EQ(text.front(), '[');
      CHECK_EQ(text.substr(text.size() - 3), "\n]\n");
      CHECK_EQ(check::count_of(text, "\"NEGOTIATE_ALLREDUCE\""), 5u);
      CHECK_EQ(check::count_of(text, "\"ALLREDUCE\""), 5u);
      CHECK_EQ(check::count_of(text, "\"ranks\": 2, "), 5u);
      CHECK_EQ(check::count_of(text, "\"rank\": 1, \"size\": 2, \"host\": \""), 1u);
      CHECK_EQ(check::count_of(text, "CYCLE_START"), round % 2 == 0 ? 5u : 0u);
    }
  });
  unlink(path.c_str());
  rmdir(folder);
}

TEST(a_file_that_cannot_be_written_is_an_error_and_leaves_no_timeline) {
  Timeline timeline(0, 1);
  const Status status = timeline.start("/nowhere/timeline.json", false);
  CHECK_HAS(status.message(), "/nowhere/timeline.json");
  timeline.stop();
}

}  // namespace
}  // namespace hvl
