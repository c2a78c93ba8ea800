"""A recipe's steps and evaluations in each execution mode against the CPU, and checkpoints that move between the two.

Tolerance 1e-4 on losses, as float32 differences of 1e-7 grow over the steps.
"""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from pipelines.device import EXECUTIONS, DeviceConfig
from pipelines.evaluation import evaluate
from pipelines.execution import Execution, start
from pipelines.position import Position
from pipelines.reading import SourceBatch
from pipelines.tpu import EAGER_MODES
from pipelines.train_loop import TrainConfig
from pipelines.training_state import TrainingState, load_weights
from tests.pipelines.conftest import SCHEMA, click_rows
from tests.pipelines.test_train_loop import a_model
from tpurec.errors import TpurecError
from tpurec.features import Ladder, pack
from tpurec.features.transform import Transformer
from tpurec.models import TablesConfig
from tpurec.sharding.checkpoint import Checkpointer

STEPS, ROWS = 20, 16
CONFIG = TrainConfig(batch_size=ROWS, learning_rate=0.01, weight_decay=0.01)
TABLES = TablesConfig(embedding_dim=8, learning_rate=0.1)
RUNGS = (16, 24, 32, 48)


def batches(count=STEPS, ladder=RUNGS):
    """The number of tags wavers between rungs; every third batch has rows without a label."""
    found = []
    for number in range(count):
        columns = Transformer(SCHEMA)(click_rows(ROWS, number)).slice(0, ROWS - 5 * (number % 2))
        if number % 3 == 0:
            columns.labels[:2] = np.nan
        found.append(SourceBatch(pack(columns, ROWS, Ladder(ladder))))
    return found


@dataclasses.dataclass
class Trained:
    """A model, its step, and what the steps gave."""

    model: torch.nn.Module
    step: object
    losses: list
    before: dict
    metrics: dict


def train(execution, config=CONFIG, tables=TABLES):
    model = execution.place(a_model(tables))
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    step = execution.train_step(model, config)
    losses = []
    for number, ready in enumerate(execution.feed()(batches())):
        step.set_learning_rates(0.01 / (1 + number), 0.1 / (1 + number))
        losses.append(step(ready.batch(), ready.num_labelled))
    losses = [loss.item() for loss in losses]  # read at the end, as the loop does
    metrics = evaluate(model, batches(6), feed=execution.evaluation_feed(), forward=execution.forward(model))
    return Trained(model, step, losses, before, metrics)


def on_tpu(execution, on_recompile="warn"):
    found = []
    return start(DeviceConfig("tpu", execution, on_recompile), found.append), found


@pytest.fixture(scope="module")
def on_cpu():
    return train(Execution())


@pytest.mark.parametrize("mode", EXECUTIONS["tpu"])
def test_every_mode_trains_and_scores_as_the_cpu_does(mode, on_cpu):
    if mode == "debug":
        # The emulator compiles with the help of Python, which torch_tpu keeps to itself while it waits for a program
        # that a JAX function became: for ever. `strict` has the same programs, and does not wait.
        train(on_tpu("strict")[0])
    execution, found = on_tpu(mode, "error" if mode == "compile" else "warn")
    assert torch.tpu.eager_mode == torch.tpu.EagerMode[EAGER_MODES[mode]]
    trained = train(execution)
    np.testing.assert_allclose(trained.losses, on_cpu.losses, atol=1e-4)
    for name, value in on_cpu.model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)
        assert not torch.equal(value, on_cpu.before[name]), f"{name} did not train"
    for name, value in on_cpu.step.optimizer_state().items():
        torch.testing.assert_close(trained.step.optimizer_state()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)
    for name, value in on_cpu.metrics.items():
        assert trained.metrics[name] == pytest.approx(value, abs=1e-4), name
    assert execution.compilations.programs == sum(entry.programs for entry in found)
    assert found or mode == "debug"  # which runs the programs of `strict`
    if mode == "compile":
        # One program each time that the tags' capacity grew, though the ids of single batches waver.
        for activity in ("training", "evaluation"):
            grown = [entry.capacities["tags"] for entry in found if entry.activity == activity]
            assert 2 <= len(grown) <= len(RUNGS) and all(low < high for low, high in pairwise(grown))
        needed = [item.packed.sparse["tags"].capacity for item in batches()]
        assert sum(one != other for one, other in pairwise(needed)) > len(RUNGS)


def test_a_recompilation_per_batch_ends_the_run():
    """A mistake on purpose: a Python number that changes with every step goes into the program."""
    execution, found = on_tpu("compile", "error")
    model = execution.place(a_model(TABLES))
    step = execution.train_step(model, TrainConfig(optimizer="sgd"))
    done = []
    inner = step._optimizer.step
    step._optimizer.step = lambda gradients, rate: inner(gradients, rate * len(done))
    with pytest.raises(TpurecError, match=r"training compiled a program that it should not need \(16 rows.*already"):
        for ready in execution.feed()(batches(3, (32,))):
            step(ready.batch(), ready.num_labelled)
            done.append(None)
    assert len(done) == 1 and [bool(entry.unexpected) for entry in found] == [False, True]


def tensors_of(step):
    return {name: value.detach().cpu().clone() for name, value in TrainingState(step)._tensors().items()}


@pytest.mark.parametrize("kind", ["row_wise_adagrad", "adagrad", "sgd", "adam"])
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_a_checkpoint_moves_between_cpu_and_tpu_to_the_bit(tmp_path, kind, optimizer):
    """Written on one, loaded on the other, written there, loaded back: every tensor is what it was."""
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    tables = dataclasses.replace(TABLES, optimizer=kind)
    executions = {"tpu": on_tpu("strict")[0], "cpu": Execution()}
    for first, second in (("tpu", "cpu"), ("cpu", "tpu")):
        trained = executions[first].train_step(executions[first].place(a_model(tables)), config)
        trained.set_learning_rates(0.01, 0.1)
        for ready in executions[first].feed()(batches(3)):
            trained(ready.batch(), ready.num_labelled)
        expected = tensors_of(trained)
        folder = TrainingState(trained).save(Checkpointer(tmp_path / first, 1), Position(step=3), None, {})
        there = executions[second].train_step(executions[second].place(a_model(tables)), config)
        assert not all(torch.equal(value, expected[name]) for name, value in tensors_of(there).items())
        assert TrainingState(there).load(folder).step == 3
        again = TrainingState(there).save(Checkpointer(tmp_path / f"{first}-again", 1), Position(step=3), None, {})
        back = executions[first].train_step(executions[first].place(a_model(tables)), config)
        TrainingState(back).load(again)
        for step in (there, back):
            found = tensors_of(step)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (first, name)


def test_weights_alone_are_loaded_to_the_bit_and_trained_on(tmp_path):
    """As a run does when it evaluates its best checkpoint; the views of the tables stay views."""
    execution, _ = on_tpu("strict")
    trained = execution.train_step(execution.place(a_model(TABLES)), CONFIG)
    trained.set_learning_rates(0.01, 0.1)
    first, *others = (ready for ready in execution.feed()(batches(3)))
    trained(first.batch(), first.num_labelled)
    kept = {name: value.cpu().clone() for name, value in trained.model.state_dict().items()}
    folder = TrainingState(trained).save(Checkpointer(tmp_path, 1), Position(step=1), None, {})
    for ready in others:
        trained(ready.batch(), ready.num_labelled)
    load_weights(trained.model, folder)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value.cpu(), kept[name]), name
    trained(first.batch(), first.num_labelled)
    for name, value in trained.model.state_dict().items():
        assert not torch.equal(value.cpu(), kept[name]), f"{name} did not train on"
