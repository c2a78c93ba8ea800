"""Unpooled lookups, Adam and stochastic rounding on the device against the CPU."""

import copy

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.types import DataType

from tests.embeddings.test_sequence import batch, loss_of, make_tables
from tpurec.embeddings import SGD, Adam, FusedEmbeddingBagCollection, FusedEmbeddingCollection, RowWiseAdam


def gradient_like(values):
    return torch.linspace(-1, 1, values.numel()).view_as(values)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.01, weight_decay=0.1), RowWiseAdam(lr=0.01, max_gradient_norm=0.5)])
def test_sequences_train_as_on_the_cpu(optimizer):
    """Three steps on a compact batch; ids of -1 give zeros. The step count is the CPU's, too."""
    torch.manual_seed(0)
    on_cpu = FusedEmbeddingCollection(make_tables(), optimizer)
    on_tpu = copy.deepcopy(on_cpu).to("tpu")
    for seed in range(3):
        features = batch(seed=seed)
        features.values()[::5] = -1
        expected, actual = on_cpu(features), on_tpu(features.to("tpu"))
        assert list(expected) == list(actual)
        for name in expected:
            mine, other = actual[name].values(), expected[name].values()
            torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-6)
        gradients = [gradient_like(one.values()) for one in expected.values()]
        torch.autograd.backward([one.values() for one in expected.values()], gradients)
        on_device = [gradient.to("tpu") for gradient in gradients]
        torch.autograd.backward([one.values() for one in actual.values()], on_device)
    for name, weight in on_cpu.state_dict().items():
        torch.testing.assert_close(on_tpu.state_dict()[name].cpu(), weight, rtol=1e-5, atol=1e-5)
    for name, state in on_cpu.optimizer_state_dict().items():
        torch.testing.assert_close(on_tpu.optimizer_state_dict()[name].cpu(), state, rtol=1e-4, atol=1e-6)
    assert on_tpu.optimizer_state_dict()["embeddings.a.step"].item() == 3


def test_stochastic_rounding_is_the_cpus_to_the_bit():
    table = EmbeddingBagConfig(
        name="t", embedding_dim=16, num_embeddings=40, feature_names=["f1"], data_type=DataType.BF16
    )
    on_cpu = FusedEmbeddingBagCollection([table], SGD(lr=2.0**-6, rounding_seed=9))
    with torch.no_grad():
        on_cpu.embedding_bags["t"].weight.fill_(1.5)
    on_tpu = copy.deepcopy(on_cpu).to("tpu")
    for seed in range(3):
        for fused, features in ((on_cpu, batch(("f1",), seed=seed)), (on_tpu, batch(("f1",), seed=seed).to("tpu"))):
            fused(features).values().backward(torch.full((9, 16), 2.0**-4, device=fused.device))
    weight = on_cpu.state_dict()["embedding_bags.t.weight"]
    assert torch.equal(on_tpu.state_dict()["embedding_bags.t.weight"].cpu(), weight)
    assert weight.unique().numel() > 2


def test_state_moves_to_the_device_and_back():
    fused = FusedEmbeddingCollection(make_tables(), RowWiseAdam(lr=0.1))
    loss_of(fused(batch())).backward()
    before = {name: one.clone() for name, one in {**fused.state_dict(), **fused.optimizer_state_dict()}.items()}
    fused.to("tpu")
    assert all(one.device.type == "tpu" for one in fused.optimizer_state_dict().values())
    fused.to("cpu")
    for name, one in {**fused.state_dict(), **fused.optimizer_state_dict()}.items():
        assert torch.equal(one, before[name])
