"""PyTorch with Adasum: a linear regression whose ranks have different samples."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(42)
weights = torch.tensor([[2.0, -3.0]])
features = torch.randn(64, 2)[hvd.rank() :: hvd.size()]
targets = features @ weights.T

model = torch.nn.Linear(2, 1, bias=False)
# Adasum needs no learning rate that grows with the number of ranks.
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for _ in range(40):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()

loss = hvd.allreduce(loss.detach(), name="loss")
assert loss < 1e-3, loss
assert hvd.allgather(model.weight.detach()).std(0).max() == 0, "the ranks have the same model"
if hvd.rank() == 0:
    print("torch_adasum: learned")
