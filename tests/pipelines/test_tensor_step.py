"""The step as a function of tensors, called and compiled, on the CPU: what it computes, and which programs it needs."""

import numpy as np
import pytest
import torch

from pipelines.compilations import Compilations
from pipelines.compiler import Compiler
from pipelines.reading import SourceBatch
from pipelines.shapes import GrowingShapes, StaticFeed
from pipelines.tensor_step import TensorStep
from pipelines.train_loop import TrainConfig
from tests.pipelines.conftest import SCHEMA, click_rows
from tests.pipelines.test_train_loop import a_model, a_step
from tpurec.errors import TpurecError
from tpurec.features import Ladder, pack
from tpurec.features.transform import Transformer

ROWS = 16
CPU = torch.device("cpu")
pytestmark = [
    # dynamo's own use of what torch deprecates
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
]


def batches(count, narrow=()):
    """Batches of 16 rows with 32 tags at most; those numbered in `narrow` have so few that they fit the lowest rung."""
    found = []
    for number in range(count):
        columns = Transformer(SCHEMA)(click_rows(ROWS, number))
        columns = columns.slice(0, 4) if number in narrow else columns
        found.append(SourceBatch(pack(columns, ROWS, Ladder((16, 32, 64)))))
    return found


class Watched:
    """A compiled step and what was recorded of it."""

    def __init__(self, on_recompile="warn", optimizer="adam", reduce_gradients=None):
        self.compiler = Compiler("aot_eager")
        self.found = []
        self.compilations = Compilations(lambda: self.compiler.programs, True, on_recompile, self.found.append)
        self.model = a_model()
        self.step = TensorStep(
            self.model, optimizer, 0.01, self.compiler, self.compilations, reduce_gradients=reduce_gradients
        )
        self.step.set_learning_rates(0.01, 0.1)


def assert_same_model(one, other):
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("optimizer", "compiled"), [("adam", True), ("adagrad", False), ("sgd", False)])
def test_called_or_compiled_it_trains_as_the_eager_step_does(optimizer, compiled):
    config = TrainConfig(batch_size=ROWS, optimizer=optimizer, learning_rate=0.01, weight_decay=0.01)
    eager_model, model = a_model(), a_model()
    eager = a_step(eager_model, config)
    step = TensorStep(model, optimizer, 0.01, Compiler("aot_eager") if compiled else None)
    for number, ready in enumerate(StaticFeed(CPU)(batches(5))):
        losses = []
        for either in (eager, step):
            either.set_learning_rates(0.01 / (number + 1), 0.1 / (number + 1))
            losses.append(either(ready.batch(), ready.num_labelled).item())
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert_same_model(model, eager_model)
    for name, value in eager.optimizer_state().items():
        torch.testing.assert_close(step.optimizer_state()[name], value, rtol=1e-4, atol=1e-6)


def test_there_is_one_program_a_shape_whatever_rates_and_labelled_rows_are():
    watched = Watched("error")
    compiled = []
    for number, ready in enumerate(StaticFeed(CPU)(batches(6, narrow=(0, 1, 4)))):
        watched.step.set_learning_rates(0.01 / (number + 1), 0.1 / (number + 2))
        watched.step(ready.batch(), ready.num_labelled + number)
        compiled.append(watched.step.compiled)
    # Batch 4 is narrow again, but its features keep the capacity that they have had.
    assert compiled == [True, False, True, False, False, False]
    assert [(found.capacities["tags"], found.programs) for found in watched.found] == [(16, 1), (32, 1)]
    assert watched.found[1].shape() == "16 rows, ids of tags 32" and watched.found[0].shape() == "16 rows"
    assert watched.compilations.programs == 2 and watched.compilations.warnings() == []
    assert watched.compilations.seconds == pytest.approx(sum(found.seconds for found in watched.found))


def test_a_recompilation_per_batch_is_an_error():
    """A mistake on purpose: a Python number that changes with every step goes into the program."""
    watched = Watched("error", "sgd")
    done = []
    inner = watched.step._optimizer.step
    watched.step._optimizer.step = lambda gradients, rate: inner(gradients, rate * len(done))
    with pytest.raises(TpurecError, match=r"training compiled a program that it should not need \(16 rows.*already"):
        for ready in StaticFeed(CPU)(batches(3)):
            watched.step(ready.batch(), ROWS)
            done.append(None)
    assert len(done) == 1 and watched.compiler.programs == 2


def test_gradients_are_reduced_inside_the_compiled_step_between_backward_and_optimizer():
    def double(tensors):
        for tensor in tensors:
            tensor.mul_(2)

    watched = Watched(optimizer="sgd", reduce_gradients=double)
    plain = a_model()
    eager = a_step(plain, TrainConfig(optimizer="sgd", weight_decay=0.0))
    ready = next(StaticFeed(CPU)(batches(1)))
    before = {name: value.clone() for name, value in watched.model.state_dict().items()}
    watched.step._optimizer.weight_decay = 0.0
    eager.set_learning_rates(0.02, 0.1)
    doubled = watched.step(ready.batch(), ready.num_labelled)
    assert doubled.item() == pytest.approx(2 * eager(ready.batch(), ready.num_labelled).item(), rel=1e-6)
    assert_same_model(watched.model, plain)
    assert any(not torch.equal(value, before[name]) for name, value in watched.model.state_dict().items())


def test_padding_to_a_grown_capacity_keeps_the_rows():
    shapes = GrowingShapes()
    narrow, wide = (item.packed for item in batches(2, narrow=(0,)))
    assert shapes.fit(narrow).sparse["tags"].capacity == 16
    assert shapes.fit(wide).sparse["tags"].capacity == 32
    grown = shapes.fit(narrow)
    assert {name: feature.capacity for name, feature in grown.sparse.items()} == {"user": 16, "item": 16, "tags": 32}
    for name, feature in grown.sparse.items():
        used = narrow.sparse[name].capacity
        assert np.array_equal(feature.rows[:used], narrow.sparse[name].rows)
        assert (feature.rows[used:] == -1).all()
        assert feature.weights is None or (feature.weights[used:] == 0).all()
    assert np.array_equal(grown.labels, narrow.labels) and grown.num_rows == narrow.num_rows == 4
