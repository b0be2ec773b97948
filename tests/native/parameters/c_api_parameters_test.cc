// Parameter servers through hvl.h: with a process of its own for the server, which is killed, and in forked children.
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "parameter_processes.h"

namespace hvl {
namespace {

// The two ends of a connection, as Python hands them over.
struct Given {
  int ends[2], memory;
  hvl_parameters_connection client{}, server{};

  Given(bool is_local, int client_pid, int server_pid) {
    make_pair_of_ends(ends);
    memory = memfd_create("parameters", MFD_CLOEXEC);
    REQUIRE(ftruncate(memory, hvl_parameters_segment_bytes()) == 0);
    client.fd = ends[0];
    client.peer = "server 0 on host b";
    client.peer_pid = server_pid;
    server.fd = ends[1];
    server.peer = "client 1 on host a";
    server.peer_pid = client_pid;
    client.memory_fd = server.memory_fd = is_local ? memory : -1;
    client.has_keys = server.has_keys = 1;
    client.seal_data = server.seal_data = 1;
    memset(client.send_key, 1, sizeof client.send_key);
    memset(server.receive_key, 1, sizeof server.receive_key);
  }
  ~Given() {
    for (int fd : {ends[0], ends[1], memory}) close(fd);
  }
};

size_t count_descriptors() {
  size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

hvl_parameters_array* open_array(int64_t server, int64_t count, int32_t num_clients = 0) {
  const hvl_parameters_shard shard{server, count};
  const hvl_parameters_array_config config{1, HVL_FLOAT32, &shard, 1, num_clients};
  return hvl_parameters_open(&config);
}

const hvl_parameters_update kPlainAdd{"add", nullptr, 0, HVL_PAYLOAD_FULL, 0};

TEST(a_connection_without_a_socket_is_an_error) {
  for (const bool is_local : {true, false}) {
    Given given(is_local, getpid(), getpid());
    given.server.fd = given.client.fd = -1;
    CHECK(hvl_parameters_add_client(&given.server) != HVL_OK);
    CHECK(hvl_parameters_add_server(&given.client) < 0);
    CHECK_HAS(std::string(hvl_last_error()), "Bad file descriptor");
  }
  CHECK_EQ(hvl_parameters_stop(), HVL_OK);
}

TEST(calls_through_the_c_api_and_nothing_is_left_behind) {
  const size_t before = count_descriptors();
  for (const bool is_local : {true, false}) {
    {
      const Given given(is_local, getpid(), getpid());
      REQUIRE(hvl_parameters_add_client(&given.server) == HVL_OK);
      const int64_t server = hvl_parameters_add_server(&given.client);
      REQUIRE(server > 0);
      hvl_parameters_array* array = open_array(server, 1000, 1);
      std::vector<float> ones(1000, 1), read(1000);
      const int64_t row = 9;
      int64_t handles[] = {hvl_parameters_create(array),
                           hvl_parameters_send(array, &kPlainAdd, 0, 1000, ones.data()),
                           hvl_parameters_send_rows(array, &kPlainAdd, &row, 1, 100, ones.data()),
                           hvl_parameters_tick(array, 0),
                           hvl_parameters_receive(array, 0, 1000, read.data()),
                           0};
      CHECK_EQ(hvl_parameters_wait_all(handles, 6, 10), HVL_OK);
      CHECK_EQ(read[899], 1);
      CHECK_EQ(read[900], 2);
      CHECK_EQ(hvl_parameters_wait(hvl_parameters_receive_rows(array, &row, 1, 10, read.data()), 10), HVL_OK);
      CHECK_EQ(hvl_parameters_poll(1 << 30), -HVL_UNKNOWN_HANDLE);
      const double lr = 0.1;
      for (const auto& [update, text] : std::vector<std::pair<hvl_parameters_update, std::string>>{
               {{"sgd", nullptr, 0, 0, 0}, "the rule 'sgd' has 1 arguments, not 0"},
               {{"", nullptr, 0, 0, 0}, "the name of a rule has 1 to 64 bytes"},
               {{"sgd", &lr, 9, 0, 0}, "more than 4 arguments"},
               {{"sgd", &lr, 1, 7, 0}, "no such payload"}}) {
        CHECK_EQ(hvl_parameters_send(array, &update, 0, 1, ones.data()), -HVL_INVALID_ARGUMENT);
        CHECK_HAS(hvl_last_error(), text);
      }
      const hvl_parameters_update unknown{"unknown", nullptr, 0, 0, 0};
      CHECK_EQ(hvl_parameters_wait(hvl_parameters_send(array, &unknown, 0, 1, ones.data()), 10), HVL_INVALID_ARGUMENT);
      CHECK_HAS(hvl_last_error(), "server 0 on host b: there is no rule 'unknown'");
      CHECK_EQ(hvl_parameters_remove_server(server), HVL_OK);
      const int64_t late = hvl_parameters_send(array, &kPlainAdd, 0, 1, ones.data());
      CHECK_EQ(hvl_parameters_wait(late, 10), HVL_SHUT_DOWN);
      CHECK_HAS(hvl_last_error(), "has closed the connection to server 0 on host b");
      hvl_parameters_close(array);
    }
    CHECK_EQ(hvl_parameters_stop(), HVL_OK);
    CHECK_EQ(count_descriptors(), before);
  }
}

TEST(a_killed_server_ends_a_large_push_within_a_second) {
  for (const bool is_local : {true, false}) {
    int pids[2];
    REQUIRE(pipe(pids) == 0);
    const int client_pid = getpid();
    auto given = std::make_unique<Given>(is_local, client_pid, 0);
    const int child = fork();
    if (child == 0) {  // no test framework here
      const bool serves = hvl_parameters_add_client(&given->server) == HVL_OK;
      if (write(pids[1], &serves, 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(pids[1]);
    bool serves = false;
    REQUIRE(read(pids[0], &serves, 1) == 1 && serves);
    given->client.peer_pid = child;
    hvl_parameters_array* array = open_array(hvl_parameters_add_server(&given->client), 2 << 20);
    given = nullptr;
    const std::vector<float> ones(2 << 20, 1);
    CHECK_EQ(hvl_parameters_wait(hvl_parameters_create(array), 10), HVL_OK);
    std::vector<int64_t> handles(50);
    for (int64_t& handle : handles) handle = hvl_parameters_send(array, &kPlainAdd, 0, 2 << 20, ones.data());
    CHECK_EQ(hvl_parameters_wait(handles[0], 10), HVL_OK);
    kill(child, SIGKILL);
    const uint64_t killed = now_ns();
    handles[0] = 0;
    CHECK_EQ(hvl_parameters_wait_all(handles.data(), 50, 10), HVL_JOB_BROKEN);
    CHECK(now_ns() - killed < kSecond);
    CHECK_HAS(hvl_last_error(), "the connection to server 0 on host b was lost");
    waitpid(child, nullptr, 0);
    CHECK_EQ(hvl_parameters_stop(), HVL_OK);
    hvl_parameters_close(array);
    close(pids[0]);
  }
}

TEST(a_forked_child_cannot_use_the_parents_connections_and_keeps_none_open) {
  for (const bool is_local : {true, false}) {
    const Given given(is_local, getpid(), getpid());
    const size_t before = count_descriptors();
    REQUIRE(hvl_parameters_add_client(&given.server) == HVL_OK);
    hvl_parameters_array* array = open_array(hvl_parameters_add_server(&given.client), 10);
    CHECK_EQ(hvl_parameters_wait(hvl_parameters_create(array), 10), HVL_OK);
    const int child = fork();
    if (child == 0) {
      const bool fails =
          hvl_parameters_create(array) == -HVL_NOT_INITIALIZED && hvl_parameters_poll(1) == -HVL_NOT_INITIALIZED &&
          std::string(hvl_last_error()).find("forked") != std::string::npos &&
          hvl_parameters_add_client(&given.server) == HVL_NOT_INITIALIZED && hvl_parameters_stop() == HVL_OK;
      _exit(fails && count_descriptors() == before ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    CHECK_EQ(hvl_parameters_wait(hvl_parameters_create(array), 10), HVL_OK);
    hvl_parameters_stop();
    hvl_parameters_close(array);
  }
}

}  // namespace
}  // namespace hvl
