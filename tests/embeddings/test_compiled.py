"""`torch.compile` on the CPU: one graph, and tables that train as they do eagerly."""

import copy

import pytest
import torch

from tests.embeddings.test_fuse import BATCH_SIZE, MODELS
from tests.embeddings.test_fused import batch
from tpurec.embeddings import RowWiseAdagrad, dense_gradients, fuse

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
pytestmark = [
    # Inductor's and dynamo's own uses of what torch deprecates.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
]


def pair():
    torch.manual_seed(0)
    plain = MODELS["DLRM"]()
    eager, compiled = (fuse(copy.deepcopy(plain), RowWiseAdagrad(lr=0.1)) for _ in range(2))
    return eager, compiled, torch.rand(BATCH_SIZE, 4), batch(["f1", "f2"], BATCH_SIZE)


def assert_trained_alike(eager, compiled):
    fresh = pair()[0]
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)
        if "embedding_bags" in name:
            assert not torch.equal(value, fresh.state_dict()[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_forward_compiles_to_one_graph_and_backward_updates(backend):
    eager, model, dense, features = pair()
    eager(dense, features).square().mean().backward()
    torch.compile(model, backend=backend, fullgraph=True)(dense, features).square().mean().backward()
    assert_trained_alike(eager, model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_its_gradient_inside_compiles_to_one_graph(backend):
    eager, model, dense, features = pair()
    loss = eager(dense, features).square().mean()
    loss.backward()

    def step(dense, features):
        loss = model(dense, features).square().mean()
        return loss.detach(), dense_gradients(loss, model)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled_loss, gradients = torch.compile(step, backend=backend, fullgraph=True)(dense, features)
    torch.testing.assert_close(compiled_loss, loss.detach())
    assert_trained_alike(eager, model)
    expected = {name: value.grad for name, value in eager.named_parameters() if value.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)
