// How the root of a tree of hosts ends: the test holds the other ends of the connections to its children.
#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "control/tree_control.h"
#include "sync/poller.h"
#include "transports.h"

namespace hvl {
namespace {

// The root of a job of one rank on each host, and the connections of its children to it.
struct Tree {
  Tree(int num_children, const Wiring& wiring)
      : ranks(1 + num_children, wiring), memory(HostMemory::anonymous(HostShape{1, 4096, 2})) {
    int pipe[2];
    REQUIRE(pipe2(pipe, O_NONBLOCK | O_CLOEXEC) == 0);
    REQUIRE(poller.open(pipe[0]).ok());
    close(pipe[0]);
    write_end = pipe[1];
    std::vector<std::unique_ptr<Connection>> to_children;
    for (int child = 1; child <= num_children; ++child) {
      to_children.push_back(ranks.connect(0, child));
      REQUIRE(poller.watch(to_children.back()->fd()).ok());
      children.push_back(ranks.connect(child, 0));
    }
    ranks.drop();
    CoordinatorHostOptions options;
    options.coordinator.size = 1 + num_children;
    root = std::make_unique<TreeRoot>(memory, options, std::vector<int>{0}, std::vector<int>(), std::move(to_children));
  }

  ~Tree() { close(write_end); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  // The root decides that the job ends.
  void shut_down() {
    Message message;
    message.type = Message::Type::kShutdown;
    message.text = std::string(size_t{4} << 20, '.');  // more than the kernel takes
    CHECK_EQ(root->send(message).message(), "");
  }
  // Until nothing moves any more.
  void pump() {
    for (bool progressed = true; progressed;) {
      progressed = false;
      CHECK_EQ(root->pump(&progressed).message(), "");
      for (const auto& child : children) {
        if (child == nullptr) continue;
        CHECK_EQ(child->pump(&progressed).message(), "");
        std::string frame;
        while (child->receive(&frame)) {
        }
      }
    }
  }

  RemoteRanks ranks;
  std::shared_ptr<HostMemory> memory;
  Poller poller;
  int write_end = -1;
  std::unique_ptr<TreeRoot> root;
  std::vector<std::unique_ptr<Connection>> children;
};

TEST(the_end_reaches_all_and_nobody_leaves_before) {
  for (const Wiring& wiring : {Wiring(), in_memory()}) {
    Tree tree(2, wiring);
    tree.shut_down();
    tree.pump();
    Record record;
    bool found = false;
    CHECK(tree.root->next(&record, &found).ok());
    REQUIRE(found);
    CHECK_EQ(record.type, Record::Type::kShutdown);
    tree.root->finish();
    for (const auto& child : tree.children) {
      tree.pump();
      CHECK(!tree.root->is_flushed());
      child->finish();
    }
    tree.pump();
    CHECK(tree.root->is_flushed());
  }
}

TEST(a_child_that_is_lost_when_the_log_has_ended_keeps_nobody_from_leaving) {
  for (const Wiring& wiring : {Wiring(), in_memory()}) {
    Tree tree(2, wiring);
    tree.shut_down();
    bool progressed = false;
    CHECK(tree.root->pump(&progressed).ok());
    tree.children[0] = nullptr;  // before all of the log has been written to it
    tree.pump();
    Record record;
    bool found = false;
    CHECK(tree.root->next(&record, &found).ok());
    REQUIRE(found);
    CHECK_EQ(record.type, Record::Type::kShutdown);
    tree.root->finish();
    tree.pump();
    CHECK(!tree.root->is_flushed());  // the other one has not ended yet
    tree.children[1]->finish();
    tree.pump();
    CHECK(tree.root->is_flushed());
  }
}

TEST(a_connection_that_is_over_wakes_nobody) {
  for (const Wiring& wiring : {Wiring(), in_memory()}) {
    constexpr uint64_t kShort = 5 * kMillisecond;
    Tree tree(2, wiring);
    tree.shut_down();
    tree.pump();
    tree.root->finish();
    tree.children[0]->finish();
    tree.pump();
    tree.children[0] = nullptr;
    const uint64_t start = now_ns();
    tree.poller.sleep_idle(kShort);
    CHECK(now_ns() - start >= kShort);
    tree.children[1] = nullptr;  // it is killed
    tree.pump();
    const uint64_t again = now_ns();
    tree.poller.sleep_idle(kShort);
    CHECK(now_ns() - again >= kShort);
  }
}

}  // namespace
}  // namespace hvl
