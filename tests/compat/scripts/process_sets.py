"""Process sets made of communicators, the second way of Horovod's page about them; started by MPI on 3 ranks."""

import horovod.torch as hvd
import torch
from mpi4py import MPI

world = MPI.COMM_WORLD
parts = world.Split(color=world.rank % 2, key=world.rank)
part = hvd.ProcessSet(parts)
pair = hvd.ProcessSet([0, 1])
hvd.init(world, process_sets=[part, pair])

assert part.included() and part.ranks == [rank for rank in range(hvd.size()) if rank % 2 == hvd.rank() % 2]
assert part.size() == len(part.ranks) and part.rank() == hvd.rank() // 2 and part.mpi_comm is parts
members = hvd.allreduce(torch.tensor([1.0, hvd.rank()]), name="members", op=hvd.Sum, process_set=part)
assert members.tolist() == [part.size(), sum(part.ranks)]
if pair.included():
    assert hvd.allreduce(torch.tensor(1.0), name="pair", op=hvd.Sum, process_set=pair) == 2
if hvd.rank() == 0:
    print("process sets:", *hvd.mpi_ops._basics._get_process_set_ids_and_ranks().values())
hvd.barrier()  # a rank that ends shuts the job down for those that are still at work
