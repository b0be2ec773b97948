// The parts of an engine in a job of several hosts, made of what it is given.
#pragma once

#include <memory>

#include "control/coordinator_host.h"
#include "engine/engine.h"

namespace hvl {

// Null in a job of one host. These throw std::runtime_error where the system refuses something.
std::unique_ptr<Poller> make_poller(const EngineOptions& options);
// Of local rank 0. What it listens to wakes `poller`.
std::unique_ptr<ControlPlane> make_tree_leader(const EngineOptions& options,
                                               const CoordinatorHostOptions& coordinator_host,
                                               const std::shared_ptr<HostMemory>& memory, Poller* poller);
std::unique_ptr<DataPlane> make_hosts_data_plane(const EngineOptions& options,
                                                 const std::shared_ptr<HostMemory>& memory, Waiter* waiter);

}  // namespace hvl
