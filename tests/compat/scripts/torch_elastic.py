"""Elastic PyTorch: a state with a model, an optimizer, a sampler and positions."""

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(42)
features = torch.randn(64, 2)
dataset = TensorDataset(features, features @ torch.tensor([[2.0], [-3.0]]))
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = torch.nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 6):
        for batch, (x, y) in enumerate(loader):
            state.batch = batch
            optimizer.zero_grad()
            state.loss = torch.nn.functional.mse_loss(model(x), y)
            state.loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, 8)
            if batch % 2 == 1:
                state.loss = state.loss.item()
                state.commits += 1
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
    return float(state.loss)


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, loss=0.0, commits=0, sampler=sampler)
state.register_reset_callbacks([on_state_reset])
loss = train(state)
assert loss < 0.05, loss
if hvd.rank() == 0:
    print(f"torch_elastic: learned, {state.commits} commits")
