"""Frameworks in an elastic job: a worker is killed, another one joins, and the training comes to what it would have."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from elastic_job import ElasticJob

STEPS = 12
KILLED_AT = 5
VICTIM = 1

# Steps, parameters, those after STEPS steps if this worker was there, and what one rank alone comes to by then.
Result = tuple[int, np.ndarray, "np.ndarray | None", np.ndarray]


def _with_torch() -> Result:
    """Train a model whose result does not depend on the number of ranks, until there are three again."""
    import torch
    from elastic_job import tell
    from support.training import flat_parameters, loss_of, make_batches, make_model, my_part

    import horovodlike.torch as hvd
    from horovodlike._bootstrap import driver_client

    hvd.init()
    number, batches, reached = driver_client.current().number, make_batches(), []
    model = make_model()
    schedule_of = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)  # noqa: E731
    adam = torch.optim.Adam(model.parameters(), lr=0.01)  # whose state is made in its first step
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(100))
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule_of(optimizer), sampler=sampler, step=0)

    @hvd.elastic.run
    def train(state):
        assert sampler.num_replicas == hvd.size()
        while state.step < STEPS or hvd.size() < 3:
            optimizer.zero_grad()
            x, y = batches[state.step % len(batches)]
            loss_of(model, my_part(x), my_part(y)).backward()
            if (number, state.step) == (VICTIM, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.schedule.step()
            state.step += 1
            if state.step == STEPS:
                reached.append(flat_parameters(model).numpy().copy())
            state.commit()
            tell(state.step)
        hvd.check_consistency(model)

    train(state)
    alone = make_model()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    schedule = schedule_of(plain)
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(alone, *batches[step % len(batches)]).backward()
        plain.step()
        schedule.step()
    return state.step, flat_parameters(model).numpy(), reached[-1] if reached else None, flat_parameters(alone).numpy()


def _with_keras() -> Result:
    import keras
    from elastic_job import tell

    import horovodlike.keras as hvd
    from horovodlike._bootstrap import driver_client

    hvd.init()
    number, reached = driver_client.current().number, []
    random = np.random.default_rng(1)
    x, y = random.standard_normal((24, 6)), random.standard_normal((24, 3))

    def make_model(wrap):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        model.compile(optimizer=wrap(keras.optimizers.Adam(0.01)), loss="mse", jit_compile=False)
        return model

    def flat(model):
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    model = make_model(hvd.DistributedOptimizer)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    class Watching(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if (number, state.epoch) == (VICTIM, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_end(self, epoch, logs=None):
            tell(state.epoch)
            if state.epoch == STEPS:
                reached.append(flat(self.model))
            self.model.stop_training = state.epoch >= STEPS and hvd.size() == 3

    @hvd.elastic.run
    def train(state):
        part = slice(hvd.rank(), None, hvd.size())
        callbacks = [
            hvd.elastic.CommitStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Watching(),
        ]
        options = {"batch_size": 24, "initial_epoch": state.epoch, "epochs": 10**9, "verbose": 0}
        model.fit(x[part], y[part], callbacks=callbacks, **options)

    train(state)
    alone = make_model(lambda optimizer: optimizer)
    alone.fit(x, y, batch_size=24, epochs=STEPS, verbose=0)
    return state.epoch, flat(model), reached[-1] if reached else None, flat(alone)


def _with_horovods_example_for_keras(size: int) -> tuple[int, np.ndarray]:
    """A step before the state is made, and again in the reset callback, in which one more worker is lost."""
    import keras
    from elastic_job import tell

    import horovodlike.keras as hvd
    from horovodlike._bootstrap import driver_client

    hvd.init()
    number = driver_client.current().number
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse", jit_compile=False)
    x, y = np.ones((4, 2)), np.ones((4, 3))

    def fit_one_step():
        model.fit(x, y, steps_per_epoch=1, epochs=1, verbose=0)

    def lose_one():
        if number == 2 and hvd.size() == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fit_one_step()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.register_reset_callbacks([lose_one, fit_one_step])

    class Watching(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if (number, state.epoch) == (VICTIM, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_end(self, epoch, logs=None):
            tell(state.epoch)
            self.model.stop_training = state.epoch >= STEPS and hvd.size() == size

    @hvd.elastic.run
    def train(state):
        callbacks = [hvd.elastic.CommitStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), Watching()]
        model.fit(x, y, initial_epoch=state.epoch, epochs=10**9, verbose=0, callbacks=callbacks)

    train(state)
    return state.epoch, np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), [("tensorflow", 3), ("torch", 2)])
def test_keras_fits_a_step_in_a_reset_callback(backend, size):
    before = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    lost = range(1, size)  # one in training, and of three one more in the callback
    with ElasticJob(size, _with_horovods_example_for_keras, size, modules=["horovodlike.keras"], before=before) as job:
        job.wait_to_hear(0, KILLED_AT + 1)
        job.add(len(lost))
        (steps, weights), *others = job.values(*lost)
        assert len(others) == len(lost) and steps >= STEPS
        assert all(each == steps and np.array_equal(weights, other) for each, other in others)


def _check(train, tolerance: float, **imports: Any) -> None:
    with ElasticJob(3, train, **imports) as job:
        job.wait_to_hear(0, KILLED_AT + 1)  # after which the victim is gone
        job.add()
        values = job.values(VICTIM)
        assert job.sizes == [3, 2, 3]
        steps, parameters, reached, alone = values[0]
        assert steps >= STEPS and len(values) == 3
        for other_steps, other, *_ in values[1:]:
            assert other_steps == steps and np.array_equal(parameters, other)
        np.testing.assert_allclose(reached, alone, rtol=0, atol=tolerance)


# horovod#2652: a new worker, whose Adam had no state yet, hung before its first step.
@pytest.mark.slow
def test_pytorch_goes_on_without_a_worker_and_with_a_new_one():
    _check(_with_torch, 1e-12, modules=["horovodlike.torch"])


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ("tensorflow", "torch"))
def test_keras_goes_on_without_a_worker_and_with_a_new_one(backend):
    before = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    _check(_with_keras, 1e-4, modules=["horovodlike.keras"], before=before)
