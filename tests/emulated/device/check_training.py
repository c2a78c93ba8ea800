"""DLRM on the device, eagerly in each mode and compiled, against the CPU: 20 steps.

Tolerance 1e-4 on losses, as float32 differences of 1e-7 grow over the steps.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from tpurec.embeddings import (
    Adagrad,
    RowWiseAdagrad,
    dense_gradients,
    dense_parameters,
    fuse,
    fused_optimizer_state_dict,
    to_torch,
)
from tpurec.features.packing import Ladder, PackedBatch, PackedFeature
from tpurec.ops._tpu_guard import DroppedUpdate

BATCH_SIZE, NUM_DENSE, ROWS, STEPS = 8, 4, 50, 20
LADDER = Ladder((8, 16, 32))
KEYS = ("f1", "f2", "f3")


def packed_batch(seed, rows=ROWS):
    generator = np.random.default_rng(seed)
    features = {}
    longest = 0
    ids_of = {}
    for name in KEYS:
        lengths = generator.integers(0, 2 + seed % 3, BATCH_SIZE).astype(np.int32)
        ids_of[name] = lengths, generator.integers(0, rows, lengths.sum()).astype(np.int32)
        longest = max(longest, int(lengths.sum()))
    for name, (lengths, ids) in ids_of.items():
        padded = np.full(LADDER.rung(longest), -1, np.int32)
        padded[: len(ids)] = ids
        features[name] = PackedFeature(padded, lengths)
    dense = generator.normal(size=(BATCH_SIZE, NUM_DENSE)).astype(np.float32)
    labels = (generator.random(BATCH_SIZE) < 0.5).astype(np.float32)
    return PackedBatch(dense, labels, np.ones(BATCH_SIZE, bool), features, BATCH_SIZE)


def make_model(device, optimizer=None):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{number}", embedding_dim=8, num_embeddings=ROWS + number, feature_names=[name])
        for number, name in enumerate(KEYS)
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), NUM_DENSE, [16, 8], [8, 1])
    return fuse(model, optimizer or RowWiseAdagrad(lr=0.1)).to(device)


def loss_of(model, dense, features, labels):
    return F.binary_cross_entropy_with_logits(model(dense, features).squeeze(1), labels)


def eager_losses(device, steps=STEPS, optimizer=None):
    model = make_model(device, optimizer)
    stepper = torch.optim.SGD(dense_parameters(model), lr=0.1)
    losses = []
    for seed in range(steps):
        batch = to_torch(packed_batch(seed), device, static=True)
        stepper.zero_grad()
        loss = loss_of(model, batch.dense, batch.features, batch.labels)
        loss.backward()
        stepper.step()
        losses.append(loss.detach().cpu().item())
    return losses, model


def compiled_step(model):
    parameters = dict(model.named_parameters())

    def step(dense, features, labels):
        loss = loss_of(model, dense, features, labels)
        gradients = dense_gradients(loss, model)
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].sub_(0.1 * gradient)
        return loss.detach()

    compiled = torch.compile(step, backend="tpu", fullgraph=True, dynamic=False)

    def run(batch):
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(batch.dense, batch.features, batch.labels)

    return run


@pytest.fixture(scope="module")
def on_cpu():
    return eager_losses("cpu")


def assert_same_model(actual, expected):
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=name)
    for name, value in fused_optimizer_state_dict(expected).items():
        torch.testing.assert_close(fused_optimizer_state_dict(actual)[name].cpu(), value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING", "DEFER_AND_FUSE"])
def test_eager_modes_equal_the_cpu(mode, on_cpu):
    """Strict, debug, and defer-and-fuse, in torch_tpu's words."""
    losses, expected = on_cpu
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode[mode]):  # as a plain call it would do nothing
        actual, model = eager_losses("tpu")
    np.testing.assert_allclose(actual, losses, atol=1e-4)
    assert_same_model(model, expected)


def test_the_compiled_step_equals_the_cpu_with_a_program_per_rung(on_cpu):
    """One graph; batches of varying id counts compile no more programs than there are rungs; tables train in place."""
    losses, expected = on_cpu
    model = make_model("tpu")
    step = compiled_step(model)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    torch._dynamo.utils.counters.clear()
    actual, rungs = [], set()
    for seed in range(STEPS):
        batch = to_torch(packed_batch(seed), "tpu")
        rungs.add(batch.features.values().numel())
        actual.append(step(batch).cpu().item())
    np.testing.assert_allclose(actual, losses, atol=1e-4)
    assert_same_model(model, expected)
    assert len(rungs) >= 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(rungs)
    for name, value in model.state_dict().items():
        assert not torch.equal(value.cpu(), before[name]), f"{name} did not train"


def test_only_touched_rows_change():
    """Case 16, compiled."""
    model = make_model("tpu", Adagrad(lr=0.1))
    before = {name: value.cpu() for name, value in model.state_dict().items() if "embedding_bags" in name}
    packed = packed_batch(2, rows=20)
    batch = to_torch(packed, "tpu")
    compiled_step(model)(batch)
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
