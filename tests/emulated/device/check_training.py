"""A training loop of one's own on the device, as docs/torch_tpu.md has it. What recipes do: check_execution.py.

Tolerance 1e-4 on losses, as float32 differences of 1e-7 grow over the steps.
"""

import numpy as np
import pytest
import torch

from tests.emulated.device.dlrm import KEYS, compiled_step, eager_step, make_model, packed_batch
from tpurec.embeddings import Adagrad, fused_optimizer_state_dict, to_torch
from tpurec.ops._tpu_guard import DroppedUpdate

STEPS = 20


def train(device, step_of):
    model = make_model(device)
    step = step_of(model)
    batches = (to_torch(packed_batch(seed, longest=2 + seed % 3), device, static=True) for seed in range(STEPS))
    return [step(batch).cpu().item() for batch in batches], model


@pytest.mark.parametrize("step_of", [eager_step, compiled_step])
def test_it_trains_as_on_the_cpu(step_of):
    """With torch.optim and `loss.backward()`, and compiled whole with the gradient inside."""
    losses, expected = train("cpu", eager_step)
    actual, model = train("tpu", step_of)
    np.testing.assert_allclose(actual, losses, atol=1e-4)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)
    for name, value in fused_optimizer_state_dict(expected).items():
        torch.testing.assert_close(fused_optimizer_state_dict(model)[name].cpu(), value, rtol=1e-3, atol=1e-4)


def test_only_touched_rows_change():
    """Case 16, compiled."""
    model = make_model("tpu", Adagrad(lr=0.1))
    before = {name: value.cpu() for name, value in model.state_dict().items() if "embedding_bags" in name}
    packed = packed_batch(2, rows=20)
    compiled_step(model)(to_torch(packed, "tpu"))
    for number, name in enumerate(KEYS):
        key = f"sparse_arch.embedding_bag_collection.embedding_bags.t{number}.weight"
        changed = (model.state_dict()[key].cpu() != before[key]).any(1).nonzero().flatten().tolist()
        feature = packed.sparse[name]
        assert set(changed) == set(feature.rows[: feature.lengths.sum()].tolist())


def test_compiling_the_forward_alone_is_an_error():
    """torch_tpu 0.2.0 would drop the updates of the tables, silently."""
    model = make_model("tpu")
    batch = to_torch(packed_batch(0), "tpu")
    forward = torch.compile(model, backend="tpu", fullgraph=True, dynamic=False)
    with pytest.raises(DroppedUpdate, match="Take the gradient inside the compiled step"):
        forward(batch.dense, batch.features).sum().backward()
