// Autotuning of a job on rank 0: the samples, the search, its log, and the final message.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "tune/sampler.h"
#include "tune/search.h"

namespace hvl {

struct AutotuneOptions {
  bool enabled = false;
  bool fusion_threshold = true;  // true: it is tuned; values set by the user are not
  bool cycle_time = true;        // likewise
  int warmup_samples = 3;
  int steps_per_sample = 10;
  std::string log;  // a CSV file; empty: none
};

class Autotuner {
 public:
  Autotuner(const AutotuneOptions& options, const Tuned& start);

  // Called when a batch begins: see Sampler::on_batch(). True if this call changed current() or ended the search.
  bool on_batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t now);
  const Tuned& current() const { return search_.current(); }
  bool is_done() const { return search_.is_done(); }
  // Called when the job ends. Logs that the search is not done, if so.
  void stop();

 private:
  void open_log(const std::string& path);
  void write_row(const Tuned& tuned, double score, const std::string& reason);
  void conclude();

  const Tuned start_;
  Sampler sampler_;
  Search search_;
  int num_samples_ = 0;
  std::ofstream log_;
};

}  // namespace hvl
