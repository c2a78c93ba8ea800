"""The dense optimizers as tensor arithmetic are torch.optim's, and their states are interchangeable."""

import copy

import pytest
import torch
from torch import nn

from pipelines.dense_optimizer import TensorOptimizer
from pipelines.step import EagerStep, torch_optimizer

KINDS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def two_layers(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)


def ours(model, kind, weight_decay):
    return TensorOptimizer(dict(model.named_parameters()), kind, weight_decay)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_200_steps_with_a_schedule_equal_torch_optim(kind, weight_decay, dtype, tolerance):
    model = two_layers(dtype)
    theirs = copy.deepcopy(model)
    stepper = KINDS[kind](theirs.parameters(), lr=0.1, weight_decay=weight_decay)
    optimizer = ours(model, kind, weight_decay)
    for number in range(200):
        rate = 0.1 / (1 + number / 20)
        gradients = {name: torch.randn_like(value) * (number % 3) for name, value in model.named_parameters()}
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name].clone()
        stepper.param_groups[0]["lr"] = rate
        stepper.step()
        optimizer.step(gradients, torch.tensor(rate, dtype=dtype))
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_has_the_names_shapes_and_dtypes_of_torch_optim(kind):
    """So a checkpoint moves between execution modes."""
    model = two_layers(torch.float32)
    tensors = ours(model, kind, 0.0).state()
    eager = EagerStep(model, torch_optimizer(model, kind, 0.1, 0.0)).optimizer_state()
    assert {name: (value.shape, value.dtype) for name, value in tensors.items()} == {
        name: (value.shape, value.dtype) for name, value in eager.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_torch_optim_left_is_gone_on_with(kind):
    eager_model = two_layers(torch.float64)
    eager = EagerStep(eager_model, torch_optimizer(eager_model, kind, 0.1, 0.0))
    generator = torch.Generator().manual_seed(1)
    gradients = [
        {name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in named}
        for named in [list(eager_model.named_parameters())] * 6
    ]

    def eagerly(step_gradients):
        for name, parameter in eager_model.named_parameters():
            parameter.grad = step_gradients[name].clone()
        eager.dense_optimizer.step()

    for step_gradients in gradients[:3]:
        eagerly(step_gradients)
    model = copy.deepcopy(eager_model)
    optimizer = ours(model, kind, 0.0)
    for name, value in optimizer.state().items():
        value.copy_(eager.optimizer_state()[name])
    for step_gradients in gradients[3:]:
        eagerly(step_gradients)
        optimizer.step(step_gradients, torch.tensor(0.1, dtype=torch.float64))
    for one, other in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_parameter_without_a_gradient_keeps_its_value_and_count():
    model = two_layers(torch.float32)
    optimizer = ours(model, "adam", 0.1)
    before = model[1].weight.clone()
    optimizer.step({"0.weight": torch.ones(3, 4)}, torch.tensor(0.1))
    assert torch.equal(model[1].weight, before)
    counts = {name: value.item() for name, value in optimizer.state().items() if name.endswith(".step")}
    assert counts == {"0.weight.step": 1, "0.bias.step": 0, "1.weight.step": 0, "1.bias.step": 0}
