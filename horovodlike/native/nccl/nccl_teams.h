// The teams that have run collectives on GPUs, and their communicators, until these are freed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nccl/nccl_agreement.h"

namespace hvl {

// Only the thread that holds the engine lock may use it.
class NcclTeams {
 public:
  explicit NcclTeams(NcclContext context) : context_(std::move(context)), none_(&context_, nullptr) {}
  NcclTeams(const NcclTeams&) = delete;
  NcclTeams& operator=(const NcclTeams&) = delete;
  // Must be called before anything else. `library`: NCCL's file.
  void open(const std::string& library, CudaStream stream);

  // The next collective is this team's. It uses no NCCL if that is not allowed, or a rank of the process set takes no
  // part.
  void begin(const TeamPtr& team, bool allows_nccl);
  // The agreement of the team that the last begin() named.
  NcclAgreement& agreement() { return *current_; }
  NcclCommunicator* communicator() const { return current_->communicator(); }
  // True if any team uses NCCL.
  bool use_nccl() const;

  // An error: a communicator has failed.
  Status check() const;
  // Gives up a team that will have no more collectives: finish_retired() finishes its communicator.
  void forget(const TeamPtr& team);
  bool has_retired() const { return !retired_.empty(); }
  // Finishes the communicators of forgotten teams, while the device has no work. Does not wait for those that fail.
  void finish_retired();
  // Finishes all communicators, as the job ends; the device has no work. Aborts those that do not finish in time.
  void close();
  // Ends the work of all communicators on the device. False: one could not be aborted in time, now or earlier.
  bool abort();

 private:
  void retire_all();

  NcclContext context_;
  NcclAgreement none_;
  std::map<const Team*, std::unique_ptr<NcclAgreement>> by_team_;
  NcclAgreement* current_ = &none_;
  std::vector<std::unique_ptr<NcclCommunicator>> retired_;  // no longer used
  bool is_stuck_ = false;                                   // a communicator could not be aborted in time
};

}  // namespace hvl
