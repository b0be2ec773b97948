"""Measurements of horovodlike against its peers; `python -m benchmarks --help`.

`python -m benchmarks.readme` then writes the rows of `README.md`.

How a measurement is made, so that its figures mean something:

- Every peer has its own processes, which live through the whole run. One peer measures at a time; the processes of all
  others are asleep in a read from a socket. The peers take turns, in another order each round, and the result is
  the median over the rounds: a disturbance of the machine hits all peers alike, and ratios are of the same minutes.
- For the parts `training` and `distributed`, and for TensorFlow's loop in the part `keras`, each round has new
  processes, since each process computes at a speed of its own, and they take three turns. A ratio is the median of the
  ratios of all turns, and not the ratio of the two medians in the table. Their memory is allocated as under hvdrun,
  the memory of all other processes as glibc's malloc does by itself.
- One measurement: allocate and touch the buffers, check one result, warm up, barrier by the peer's own means, time a
  loop of iterations. The time of one rank is the loop's time divided by the iterations, the time of the measurement is
  the slowest rank's time.
- One thread per rank: OMP_NUM_THREADS=1 for all. No rank is bound to a core. Where a model of PyTorch trains, denormal
  numbers are taken for zero: a model that has learnt its batch has denormal gradients, with which the GPT's step takes
  up to twice as long, depending on how many steps a peer has made before.
- Buffers are ordinary 4 KiB pages aligned to 64 bytes, as PyTorch's own are by default, and hold zeros while timed,
  which no number of sums turns into an overflow. Reductions are in place.
- Bandwidth as in nccl-tests: algbw = bytes / time, busbw = algbw x 2(n-1)/n. For memcpy, in which each of n processes
  copies from one buffer of its own to another, algbw counts the bytes of one process. An in-place allreduce reads and
  writes the tensor once in every process too, but in one buffer, where no cache line has to come only to be
  overwritten.
- Readers of the monitor (part `monitor`) come and go every few seconds while the same ranks train. The ratio is the
  median over pairs of adjacent windows with and without readers; its confidence interval is from the sign test.
- Over hosts (part `hosts`) the limit is the rate that iperf3 measures on the same link: in one direction where the link
  is shaped, and per direction of `--bidir`, the mean of both, where the processors are the limit. It takes its turns
  like a peer. The rate of an allreduce is its busbw, of n hosts, in bits of the tensor per second. Latency is measured
  over a cable without a switch. Bytes on the wire are counted by the first host's interface.
"""
