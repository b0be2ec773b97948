"""The strategy "horovodlike" of Lightning against one process that trains on the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import horovodlike.torch as hvd

pytestmark = pytest.mark.slow
BATCH = 4
STEPS = 8


@contextmanager
def _lightning() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, about torch's and its own functions and the size of the data
        import lightning.pytorch as pl

        import horovodlike.torch.lightning  # noqa: F401

        yield pl


def _data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    count = STEPS * BATCH * hvd.size()
    x = torch.randn(count, 5, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())


def _loader() -> torch.utils.data.DataLoader[Any]:
    """Return batches of this rank's share: together they are those of one process, in the same order."""
    data = _data()
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)


def _trainer(pl: Any, **options: Any) -> Any:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {**dict.fromkeys(quiet, False), "strategy": "horovodlike", "accelerator": "cpu", **options}
    return pl.Trainer(**options)


def _module(pl: Any, manual: bool = False) -> Any:
    """Return a model whose first parameters differ from rank to rank."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(hvd.rank())
            self.first, self.second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 1)
            self.automatic_optimization = not manual
            self.plain_backward = False
            self.norms: list[float] = []
            self.rates: list[float] = []

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.second(self.first(x).tanh()), y)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(*batch)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            if not manual:
                return loss
            one, two = self.optimizers()
            one.zero_grad()
            (torch.Tensor.backward if self.plain_backward else self.manual_backward)(loss)  # concerns both optimizers
            self.clip_gradients(one, 0.1, "norm")
            one.step()
            two.zero_grad()
            self.manual_backward(self.loss(*batch))
            two.step()
            return None

        def on_after_backward(self) -> None:
            grads = [param.grad.norm() for param in self.parameters() if param.grad is not None]
            self.norms.append(torch.stack(grads).norm().item())

        def configure_optimizers(self) -> Any:
            if manual:
                return [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (self.first, self.second)]
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_train_epoch_start(self) -> None:
            optimizers = self.optimizers()
            self.rates += [each.param_groups[0]["lr"] for each in (optimizers if manual else [optimizers])]

    return Module()


def _alone(pl: Any, passes: list[int], clip: float | None) -> list[torch.Tensor]:
    """Train one process on the batches of all ranks, from rank 0's parameters, `passes` batches in each step."""
    model = _module(pl)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for every in passes:
        for index, (x, y) in enumerate(torch.utils.data.DataLoader(_data(), batch_size=BATCH * hvd.size()), 1):
            (model.loss(x, y) / every).backward()
            if index % every == 0 or index == STEPS:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return [param.detach() for param in model.parameters()]


def _check_same(model: Any, wanted: list[torch.Tensor]) -> None:
    for param, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(param.detach(), other, rtol=1e-5, atol=1e-6)
        everywhere = hvd.allgather(param.detach().unsqueeze(0))
        assert all(torch.equal(everywhere[0], each) for each in everywhere)


def _equals_one_process() -> None:
    with _lightning() as pl:
        for schedule, clip in (({0: 1}, None), ({0: 1, 1: 3, 2: 2}, 0.05)):
            wanted = _alone(pl, [schedule.get(epoch, 1) for epoch in range(3)], clip)
            model = _module(pl)
            callbacks = [pl.callbacks.GradientAccumulationScheduler(schedule)]
            trainer = _trainer(pl, max_epochs=3, gradient_clip_val=clip, callbacks=callbacks)
            trainer.fit(model, _loader())
            _check_same(model, wanted)
            assert model.rates == [0.1, 0.05, 0.025]  # whatever the number of ranks
            assert trainer.world_size == hvd.size() and trainer.global_rank == hvd.rank()
            assert torch.distributed.is_initialized() is False
            loss = trainer.callback_metrics["loss"]
            assert torch.equal(loss, hvd.broadcast(loss, 0))


@pytest.mark.parametrize("size", (1, 2, 3))
def test_equals_one_process_with_the_whole_batch(ranks, size):
    ranks(size).run(_equals_one_process, timeout=150)


def _manual_optimization() -> None:
    with _lightning() as pl:
        wanted = _module(pl, manual=True)
        hvd.broadcast_parameters(wanted.state_dict(), 0)
        one, two = wanted.configure_optimizers()
        for x, y in torch.utils.data.DataLoader(_data(), batch_size=BATCH * hvd.size()):
            for optimizer in (one, two):
                wanted.zero_grad()
                wanted.loss(x, y).backward()
                if optimizer is one:
                    torch.nn.utils.clip_grad_norm_(wanted.first.parameters(), 0.1)
                optimizer.step()
        model = _module(pl, manual=True)
        _trainer(pl, max_epochs=1).fit(model, _loader())
        _check_same(model, [param.detach() for param in wanted.parameters()])
        norms = hvd.allgather(torch.tensor([model.norms], dtype=torch.float64))
        assert torch.allclose(norms, norms[:1]), "on_after_backward sees gradients before they are reduced"

        model.plain_backward = True
        with pytest.raises(RuntimeError, match=r"write self.manual_backward\(loss\) instead of loss.backward\(\)"):
            _trainer(pl, max_epochs=1).fit(model, _loader())


def test_several_optimizers_and_manual_optimization(ranks):
    ranks(2).run(_manual_optimization, timeout=150)


def _checkpoints(folder: Path) -> None:
    with _lightning() as pl:
        model = _module(pl)
        saving = pl.callbacks.ModelCheckpoint(folder, filename="last", monitor="loss")
        _trainer(pl, max_epochs=2, callbacks=[saving], enable_checkpointing=True).fit(model, _loader())
        assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
        _trainer(pl, max_epochs=4).fit(model, _loader())  # the same model again: the first fit's hooks are gone
        resumed = _module(pl)
        _trainer(pl, max_epochs=4).fit(resumed, _loader(), ckpt_path=folder / "last.ckpt")
        assert resumed.rates == [0.025, 0.0125]
        whole = _module(pl)
        trainer = _trainer(pl, max_epochs=4)
        trainer.fit(whole, torch.utils.data.DataLoader(_data(), batch_size=BATCH, shuffle=True))
        sampler = trainer.train_dataloader.sampler  # Lightning's
        assert (sampler.num_replicas, sampler.rank) == (hvd.size(), hvd.rank())
        _trainer(pl, max_epochs=4).fit(whole := _module(pl), _loader())
        _check_same(resumed, [param.detach() for param in whole.parameters()])


def test_checkpoints_are_written_by_one_rank_and_resumed_on_all(ranks, tmp_path):
    ranks(2).run(_checkpoints, tmp_path, timeout=150)


def _collectives() -> None:
    with _lightning() as pl:
        import torchmetrics

        strategy, rank, size = _trainer(pl).strategy, hvd.rank(), hvd.size()
        ops = torch.distributed.ReduceOp
        for op, wanted in (("mean", 0.5), ("sum", 1.0), (ops.MAX, 1.0), ("min", 0.0), (None, 1.0)):
            assert strategy.reduce(torch.tensor(float(rank)), reduce_op=op).item() == wanted, op
        mean = strategy.reduce(torch.tensor(rank))
        assert mean.item() == 0.5 and mean.dtype == torch.float32
        assert strategy.reduce("text") == "text"
        assert strategy.broadcast({"of": rank}, src=1) == {"of": 1}
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(rank == 0)
        strategy.barrier("name")
        mine = torch.full((3,), float(rank), requires_grad=True)
        gathered = strategy.all_gather(mine, sync_grads=True)
        assert gathered.tolist() == [[0.0] * 3, [1.0] * 3]
        (gathered * (rank + 1)).sum().backward()
        assert mine.grad is not None and mine.grad.tolist() == [3.0] * 3  # 1 of rank 0 and 2 of rank 1
        assert not strategy.all_gather(mine).requires_grad
        with pytest.raises(ValueError, match="reduce_op='median' is none of"):
            strategy.reduce(torch.zeros(1), reduce_op="median")
        with pytest.raises(TypeError, match="group must be a process set"):
            strategy.reduce(torch.zeros(1), group="some")

        class WithMetric(type(_module(pl))):
            def __init__(self) -> None:
                super().__init__()
                self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
                self.norm = torch.nn.BatchNorm1d(5)

            def validation_step(self, batch: Any, index: int) -> None:
                self.mean.update(float(rank))
                self.all.update(torch.full((rank + 1,), float(rank)))

            def on_validation_epoch_end(self) -> None:
                self.seen = (self.mean.compute().item(), sorted(self.all.compute().tolist()))

        model = WithMetric()
        trainer = _trainer(pl, limit_val_batches=1, sync_batchnorm=True)
        trainer.validate(model, _loader(), verbose=False)
        assert model.seen == (0.5, [0.0, 1.0, 1.0])
        assert type(model.norm) is hvd.SyncBatchNorm
        assert size == 2


def test_reductions_metrics_and_batch_normalization_use_all_ranks(ranks):
    ranks(2).run(_collectives, timeout=150)


def _process_sets() -> None:
    with _lightning() as pl:
        from horovodlike.torch.lightning import HorovodlikeStrategy

        sets = [hvd.add_process_set([0]), hvd.add_process_set([1, 2])]
        mine = sets[hvd.rank() > 0]
        trainer = _trainer(pl, max_epochs=1, strategy=HorovodlikeStrategy(mine, compression=hvd.Compression.none))
        model = _module(pl)
        trainer.fit(model, _loader())
        assert (trainer.world_size, trainer.global_rank) == (mine.size(), mine.rank())
        weights = hvd.allgather(model.first.weight.detach().unsqueeze(0))
        assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[0], weights[1])
        with pytest.raises(ValueError, match="is not a member of ProcessSet"):
            HorovodlikeStrategy(sets[hvd.rank() == 0])
        for each in sets:
            hvd.remove_process_set(each)


def test_the_ranks_of_a_process_set_train_together(ranks):
    ranks(3).run(_process_sets, timeout=150)


def _wrong_arguments() -> None:
    with _lightning() as pl:
        from horovodlike.torch.lightning import HorovodlikeStrategy

        with pytest.raises(ValueError, match="op=Adasum reduces after the step"):
            HorovodlikeStrategy(op=hvd.Adasum)
        for name in ("named_parameters", "backward_passes_per_step"):
            with pytest.raises(TypeError, match=f"{name} is set by the strategy"):
                HorovodlikeStrategy(**{name: 1})
        with pytest.raises(ValueError, match="is not registered"):
            HorovodlikeStrategy(hvd.ProcessSet([0]))
        with pytest.raises(ValueError, match=r"this host has 5 devices .* and 2 processes: start as many"):
            _trainer(pl, devices=5)
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            _trainer(pl, max_epochs=1, strategy=HorovodlikeStrategy(colour=1)).fit(_module(pl), _loader())


def test_wrong_arguments(ranks):
    ranks(2).run(_wrong_arguments, timeout=150)
