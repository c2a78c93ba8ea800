"""The optimizer step: what it divides the loss by, where gradients are reduced, and what a checkpoint sees of it."""

import pytest
import torch
from torch import nn

from pipelines.feed import DeviceFeed
from pipelines.position import Position
from pipelines.step import EagerStep, torch_optimizer
from pipelines.train_loop import Callbacks, TrainConfig, TrainLoop
from pipelines.training_state import TrainingState
from tests.pipelines.test_train_loop import LADDER, a_model, a_step, batches, same, weights
from tpurec.embeddings import dense_parameters, to_torch
from tpurec.errors import TpurecError
from tpurec.sharding.checkpoint import Checkpointer

CONFIG = TrainConfig(batch_size=32, learning_rate=0.01, optimizer="sgd")


def test_the_losses_of_shares_add_up_to_the_loss_of_the_batch_and_their_gradients_too():
    """Two workers with half a batch each, summed by hand in the hook, move the dense parameters as one worker does."""
    packed = batches(1)[0].packed
    labelled = int(packed.valid.sum())
    whole, shares = a_model(), [a_model(), a_model()]
    expected = a_step(whole, CONFIG)(to_torch(packed), labelled)

    sums = []
    for rank, model in enumerate(shares):
        step = EagerStep(model, torch_optimizer(model, "sgd", 0.01, 0.0), lambda tensors: sums.append(tensors))
        step(to_torch(packed.slice_rank(rank, 2, LADDER)), labelled)
    totals = [sum(pair) for pair in zip(*sums, strict=True)]
    torch.testing.assert_close(totals[-1], expected, rtol=1e-6, atol=0)
    gradients = [parameter.grad for parameter in dense_parameters(whole)]
    for total, gradient in zip(totals[:-1], gradients, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-5, atol=1e-7)


def test_what_the_hook_writes_is_what_the_optimizer_takes_and_the_loss_that_is_returned():
    model = a_model()
    before = weights(model)

    def zero(tensors):
        for tensor in tensors:
            tensor.zero_()

    step = EagerStep(model, torch_optimizer(model, "sgd", 0.01, 0.0), zero)
    packed = batches(1)[0].packed
    assert step(to_torch(packed), 32).item() == 0
    dense = {name for name, _ in model.named_parameters() if "embedding_bags" not in name}
    assert same({name: before[name] for name in dense}, weights(model))
    assert not same(before, weights(model))  # the tables had their step in the backward pass


class WithSpare(nn.Module):
    """A model with a parameter that its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = a_model()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, dense, features):
        return self.inner(dense, features)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_a_parameter_that_has_no_gradient_does_not_keep_a_checkpoint_from_loading(tmp_path, optimizer):
    config = TrainConfig(batch_size=32, optimizer=optimizer)
    step = a_step(WithSpare(), config)
    step(to_torch(batches(1)[0].packed), 32)
    folder = TrainingState(step).save(Checkpointer(tmp_path, 1), Position(step=1), None, {})
    other = a_step(WithSpare(), config)
    assert TrainingState(other).load(folder).step == 1
    assert same(step.optimizer_state(), other.optimizer_state())


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_making_the_state_beforehand_changes_no_bit(optimizer):
    """torch would make it in the first step; weight decay would leave traces of the step that makes it here."""
    start = torch.randn(1, 7, generator=torch.Generator().manual_seed(0))
    kinds = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    plain = nn.Linear(7, 1, bias=False)
    prepared = nn.Linear(7, 1, bias=False)
    for model in (plain, prepared):
        model.weight.data.copy_(start)
    theirs = kinds[optimizer](plain.parameters(), lr=0.1, weight_decay=0.3)
    ours = EagerStep(prepared, torch_optimizer(prepared, optimizer, 0.1, 0.3)).dense_optimizer
    for number in range(3):
        for model, stepper in ((plain, theirs), (prepared, ours)):
            model.weight.grad = start * number + 1
            stepper.step()
        assert torch.equal(plain.weight, prepared.weight)


class Elsewhere(EagerStep):
    """A step whose device works while the host goes on, as far as the loop can tell; counts what was read."""

    read = 0

    def __init__(self, model, config):
        super().__init__(
            model, torch_optimizer(model, config.optimizer, config.learning_rate, config.weight_decay), None
        )
        self.device = torch.device("meta")

    def __call__(self, batch, loss_scale_rows):
        step, loss = self, super().__call__(batch, loss_scale_rows)

        class Loss:
            def item(self):
                step.read += 1
                return loss.item()

        return Loss()


def run_loop(step, config, **callbacks):
    lines, position = [], Position()
    loop = TrainLoop(step, config, 0.1, 10, 1000, DeviceFeed("cpu"))
    loop.run(batches(10), position, Callbacks(lines.append, None, lambda at, score: None, **callbacks))
    return [(line["step"], line["log_loss"]) for line in lines], position


def test_losses_of_a_device_are_read_when_they_are_due_and_give_the_same_lines():
    config = TrainConfig(batch_size=32, learning_rate=0.01, log_every_steps=4)
    step, seen = Elsewhere(a_model(), config), []
    lines, position = run_loop(step, config, progress=lambda rows, loss: seen.append(step.read))
    expected, expected_position = run_loop(a_step(a_model(), config), config)
    assert lines == expected and position == expected_position
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 10]


def test_a_loss_that_is_not_finite_is_found_when_it_is_read_and_named_with_its_step():
    config = TrainConfig(batch_size=32, learning_rate=0.01, log_every_steps=6)
    step, done = Elsewhere(a_model(), config), []

    def spoil(rows, loss):
        done.append(rows)
        if len(done) == 2:
            with torch.no_grad():
                next(step.model.over_arch.parameters()).fill_(float("nan"))

    with pytest.raises(TpurecError, match=r"the loss is nan at step 3 \(seen after step 6\)\. Lower train\.learning"):
        run_loop(step, config, progress=spoil)
