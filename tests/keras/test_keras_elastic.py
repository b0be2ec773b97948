"""Elastic training with Keras: the state, the callbacks, and train functions that outlive a job."""

from __future__ import annotations

import os
import signal
import warnings

import numpy as np
import pytest

# Keras 3 on its backends, and Keras 2.
KERAS = pytest.mark.parametrize(
    "backend",
    (
        "tensorflow",
        pytest.param("tf_keras", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.thorough),
    ),
    indirect=True,
)


def _model(seed=1, steps=1, **options):
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = keras.Sequential(layers)
    adam = keras.optimizers.Adam(0.1)
    model.compile(optimizer=hvd.DistributedOptimizer(adam, backward_passes_per_step=steps), loss="mse", **options)
    return model


def _data(batches, rows=4):
    random = np.random.default_rng(1)
    x = random.standard_normal((batches * rows, 4)).astype("float32")
    return x, x[:, :3] * 2


def _values(state):
    from horovodlike.keras.functions import objects

    return [value.copy() for value in objects.read([*state.model.variables, *objects.variables_of(state.optimizer)])]


def _equal(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _saves_and_synchronizes():
    import horovodlike.keras as hvd
    from horovodlike.keras._backend import is_tf_keras, keras
    from horovodlike.keras.functions import objects

    model = _model(seed=hvd.rank() + 1, run_eagerly=True)
    state = hvd.elastic.KerasState(model, epoch=0, seen=[])
    assert state.optimizer is model.optimizer and objects.is_built(state.optimizer)
    at_first = _values(state)

    def train():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the ranks train from different first parameters")
            model.fit(*_data(2), batch_size=4, verbose=0)
        state.seen.append(hvd.rank())

    train()
    assert not _equal(_values(state), at_first)
    state.restore()
    assert _equal(_values(state), at_first) and state.seen == []
    for _ in range(hvd.rank() + 1):
        state.model.weights[0].assign_add(np.ones((4, 3)))
        state.seen.append(hvd.rank())
    state._commits = hvd.rank()
    state.sync()
    assert state.seen == [1, 1]
    for value in objects.read([*model.weights, *objects.variables_of(model.optimizer)]):
        everywhere = hvd.allgather(value.reshape(1, -1))
        assert np.array_equal(everywhere[0], everywhere[1])
    # Dropout goes on as it would have.
    weights = {id(weight) for weight in model.weights}
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    assert len(seeds) == (0 if is_tf_keras else 1)  # tf_keras does not show the states of its generators
    for seed in seeds:
        everywhere = hvd.allgather(objects.to_numpy(seed)[None].astype("int64"))
        assert not np.array_equal(everywhere[0], everywhere[1])
    synced = _values(state)
    train()
    state.restore()
    assert _equal(_values(state), synced)
    saved = state._saved_to_bytes()
    train()
    state.save()
    state._saved_from_bytes(saved)
    state.restore()
    assert _equal(_values(state), synced) and state.seen == [1, 1]
    with pytest.raises(ValueError, match=r"build it, or call it once, before KerasState"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="batches_per_commit must be 1"):
        hvd.elastic.CommitStateCallback(state, batches_per_commit=0)


@KERAS
def test_a_state_is_saved_restored_and_synchronized(keras_ranks):
    keras_ranks(2).run(_saves_and_synchronizes)


def _persists(path):
    import horovodlike.keras as hvd
    from horovodlike.errors import StateFileError
    from horovodlike.keras._backend import keras

    state, resumed = (hvd.elastic.KerasState(_model(seed, run_eagerly=True), epoch=0) for seed in (1, 2))
    for each in (state, resumed):
        each.persist(path)
    state.model.fit(*_data(2), batch_size=4, verbose=0)
    state.epoch = 1
    state.commit()
    resumed._resume()
    assert resumed.epoch == resumed._commits == 1
    assert _equal(_values(resumed), _values(state))
    for units in ([3, 2], [1]):
        other = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, units)])
        other.compile(optimizer=keras.optimizers.Adam(), loss="mse")
        another = hvd.elastic.KerasState(other, epoch=0)
        another.persist(path)
        with pytest.raises(StateFileError, match=f"the state in {path} does not fit this script"):
            another._resume()


@KERAS
def test_a_state_resumes_from_disk(keras_ranks, tmp_path):
    keras_ranks(1).run(_persists, str(tmp_path / "state"))


class _Interrupt(Exception):
    pass


def _callbacks(order, batches_per_commit):
    """Interrupt a training at each of its commits, and go on from what has been committed."""
    import horovodlike.keras as hvd

    model = _model(run_eagerly=True)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    trained: list[tuple[int, int]] = []
    committed: list[tuple[int, int]] = []
    commit = state.commit

    def interrupting_commit():
        commit()
        committed.append((state.epoch, state.batch))
        raise _Interrupt

    state.commit = interrupting_commit

    class Watching(hvd.elastic.UpdateBatchStateCallback):
        def on_train_batch_end(self, batch, logs=None):
            trained.append((self.state.epoch, self.state.batch))
            super().on_train_batch_end(batch, logs)

    makers = {
        "commit": lambda: hvd.elastic.CommitStateCallback(state, batches_per_commit),
        "batch": lambda: Watching(state),
        "epoch": lambda: hvd.elastic.UpdateEpochStateCallback(state),
    }
    while state.epoch < 3:
        try:
            callbacks = [makers[name]() for name in order]
            model.fit(*_data(5), batch_size=4, initial_epoch=state.epoch, epochs=3, verbose=0, callbacks=callbacks)
        except _Interrupt:
            state.restore()
            state.on_reset()
    assert not model.stop_training
    return trained, committed


@pytest.mark.parametrize("order", (("commit", "batch", "epoch"), ("epoch", "batch", "commit")))
@KERAS
def test_an_interrupted_fit_goes_on_where_it_was(keras_ranks, order):
    trained, committed = keras_ranks(1).run(_callbacks, order, 2)[0]
    assert trained == [(epoch, batch) for epoch in range(3) for batch in range(5)], "each batch once, none lost"
    assert committed == [(e, b) if b < 5 else (e + 1, 0) for e in range(3) for b in (2, 4, 5)]


def _lives(victim, jobs, ranks_in):
    """Train the same compiled model in one job after the other."""
    import horovodlike.keras as hvd
    from horovodlike import basics
    from horovodlike.keras._backend import keras

    basics.is_elastic = lambda: True  # as a driver would have it
    model = _model(seed=1, steps=2, jit_compile=False)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    traced = []
    step = model.train_step
    model.train_step = lambda *args: (traced.append(1), step(*args))[1]

    class Dying(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if hvd.rank() == victim and batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    def fit(*more):
        callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state, 2), *more]
        x, y = _data(6, rows=4 * hvd.size())
        mine = slice(hvd.rank(), None, hvd.size())
        model.fit(x[mine], y[mine], batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)

    @hvd.elastic.run
    def train(state):
        fit(Dying())

    if victim is not None:
        with pytest.raises(hvd.HorovodInternalError, match="fixed number of ranks"):
            train(state)
        state.restore()
        assert state._commits == 1 and state.batch == 2
    else:
        hvd.shutdown()
    seen = []
    traces = len(traced)
    for job, rank in zip(jobs, ranks_in, strict=True):
        if rank is None:
            hvd.shutdown()
            continue
        job.enter(rank)
        state.on_reset()
        state.sync()
        state.batch = 0
        fit()
        if hvd.size() > 1:  # all ranks have the same weights, so their train functions have communicated
            for weight in model.trainable_weights:
                everywhere = hvd.allgather(keras.ops.convert_to_numpy(weight)[None])
                assert all(np.array_equal(everywhere[0], other) for other in everywhere)
        seen.append(float(keras.ops.convert_to_numpy(model.optimizer.iterations)))
    return seen, len(traced) - traces


@pytest.mark.thorough
def test_compiled_train_functions_go_on_in_jobs_of_other_sizes(fresh_keras_ranks, generations, backend):
    pool = fresh_keras_ranks(3)
    jobs = generations(2, 1, 2)
    pool.start(_lives, [(1, jobs, ranks) for ranks in ([0, 0, 1], [], [1, None, 0])])
    first, _, third = pool.collect(timeout=240)
    assert first.ok and third.ok, [(each.error, pool.output(rank)) for rank, each in ((0, first), (2, third))]
    assert first.value[0] == [4, 7, 10] and third.value[0] == [4, 10], "steps of two batches"
    if backend == "tensorflow":
        assert first.value[1] == third.value[1] == 0, "traced in the first job only"


@pytest.mark.thorough
def test_a_function_that_was_compiled_alone_communicates_when_there_are_others(fresh_keras_ranks, generations):
    jobs = generations(1, 2, 1)
    places = [0, 0, 0], [None, 1, None]
    first, second = fresh_keras_ranks(2).run_each(_lives, [(None, jobs, ranks) for ranks in places], timeout=240)
    assert first[0] == [3, 6, 9] and second[0] == [6]
