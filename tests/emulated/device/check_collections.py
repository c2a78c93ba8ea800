"""Fused collections and `fuse` on the device against the CPU, and state that moves between the two."""

import copy

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.types import DataType

from tests.embeddings.test_fused import OPTIMIZERS, batch, keys_of, loss_of, make_tables
from tpurec.embeddings import SGD, FusedEmbeddingBagCollection, RowWiseAdagrad, fuse
from tpurec.errors import ConfigError


@pytest.mark.parametrize(
    ("optimizer", "tables", "pooling", "weighted"),
    [
        ("sgd", "shared_tables", PoolingType.SUM, True),
        ("adagrad", "mixed_dims", PoolingType.MEAN, False),
        ("rowwise_adagrad", "shared_tables", PoolingType.SUM, False),
        ("rowwise_adagrad", "one_dim", PoolingType.MEAN, True),
    ],
)
def test_three_steps_equal_the_cpu(optimizer, tables, pooling, weighted):
    """A user's compact batch, of which the device does not know where a feature begins."""
    configs = make_tables(tables, pooling)
    on_cpu = FusedEmbeddingBagCollection(configs, OPTIMIZERS[optimizer][0], weighted)
    on_tpu = FusedEmbeddingBagCollection(configs, OPTIMIZERS[optimizer][0], weighted, device="tpu")
    on_tpu.load_state_dict(on_cpu.state_dict())
    features = batch(keys_of(configs), weighted=weighted)
    for _ in range(3):
        expected, actual = on_cpu(features), on_tpu(features.to("tpu"))
        torch.testing.assert_close(actual.values().detach().cpu(), expected.values().detach(), rtol=1e-5, atol=1e-5)
        loss_of(expected).backward()
        values = actual.values()
        target = torch.linspace(-1, 1, values.numel()).view_as(values).to("tpu")
        (values - target).square().mean().backward()
    for name, weight in on_cpu.state_dict().items():
        torch.testing.assert_close(on_tpu.state_dict()[name].cpu(), weight, rtol=1e-5, atol=1e-5)
    for name, state in on_cpu.optimizer_state_dict().items():
        torch.testing.assert_close(on_tpu.optimizer_state_dict()[name].cpu(), state, rtol=1e-4, atol=1e-6)


def test_moving_to_the_device_and_back_keeps_every_bit():
    configs = make_tables("mixed_dims")
    fused = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1))
    loss_of(fused(batch(keys_of(configs)))).backward()
    before, state = copy.deepcopy(fused.state_dict()), copy.deepcopy(fused.optimizer_state_dict())
    fused.to("tpu")
    assert all(weight.device.type == "tpu" for weight in fused.parameters())
    for name, weight in before.items():
        assert torch.equal(fused.state_dict()[name].cpu(), weight)
    fused.to("cpu")
    for name, weight in before.items():
        assert torch.equal(fused.state_dict()[name], weight)
    for name, tensor in state.items():
        assert torch.equal(fused.optimizer_state_dict()[name], tensor)


def test_state_of_the_device_loads_on_the_cpu_and_back():
    configs = make_tables("shared_tables")
    on_cpu = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1))
    loss_of(on_cpu(batch(keys_of(configs)))).backward()
    on_tpu = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1), device="tpu")
    on_tpu.load_state_dict(on_cpu.state_dict())
    on_tpu.load_optimizer_state_dict(on_cpu.optimizer_state_dict())
    again = FusedEmbeddingBagCollection(configs, RowWiseAdagrad(lr=0.1))
    again.load_state_dict({name: weight.cpu() for name, weight in on_tpu.state_dict().items()})
    again.load_optimizer_state_dict({name: state.cpu() for name, state in on_tpu.optimizer_state_dict().items()})
    for first, second in ((on_cpu.state_dict(), again.state_dict()),):
        for name, weight in first.items():
            assert torch.equal(weight, second[name])
    for name, tensor in on_cpu.optimizer_state_dict().items():
        assert torch.equal(tensor, again.optimizer_state_dict()[name])


@pytest.mark.parametrize(
    "build",
    [
        lambda collection: DLRM(collection, 4, [32, 16], [8, 1]),
        lambda collection: DLRM_DCN(collection, 4, [32, 16], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
        lambda collection: SimpleDeepFMNN(4, collection, 8, 4),
    ],
    ids=["DLRM", "DLRM_DCN", "DeepFM"],
)
def test_fused_models_give_the_outputs_of_the_cpu(build):
    plain = build(EmbeddingBagCollection(tables=make_tables("one_dim")))
    fused = fuse(copy.deepcopy(plain), SGD(lr=0.1)).to("tpu")
    dense, features = torch.rand(16, 4), batch(["f1", "f2"])
    actual = fused(dense.to("tpu"), features.to("tpu")).detach().cpu()
    torch.testing.assert_close(actual, plain(dense, features).detach(), rtol=1e-5, atol=1e-5)


def test_bfloat16_tables_move_and_train():
    configs = make_tables("one_dim", data_type=DataType.BF16)
    on_cpu = FusedEmbeddingBagCollection(configs, SGD(lr=0.1))
    on_tpu = copy.deepcopy(on_cpu).to("tpu")
    features = batch(["f1", "f2"])
    for fused, moved in ((on_cpu, features), (on_tpu, features.to("tpu"))):
        fused(moved).values().square().mean().backward()
    for name, weight in on_cpu.state_dict().items():
        assert torch.equal(on_tpu.state_dict()[name].cpu(), weight)


@pytest.mark.parametrize(
    ("dim", "data_type", "message"),
    [(12, DataType.FP32, "multiples of 8"), (8, DataType.BF16, "multiples of 16"), (16, DataType.FP16, "float16")],
)
def test_what_the_kernels_cannot_hold_is_refused_by_name(dim, data_type, message):
    table = EmbeddingBagConfig(name="t", embedding_dim=dim, num_embeddings=10, feature_names=["f"], data_type=data_type)
    with pytest.raises(ConfigError, match=message):
        FusedEmbeddingBagCollection([table], SGD(lr=0.1), device="tpu")
