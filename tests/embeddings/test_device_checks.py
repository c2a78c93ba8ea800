"""The debug aid on the CPU, eager and compiled: each kind of offence is named with table, feature and position."""

import copy

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.embeddings.offences import OFFENCES, batch_with, make_collection, spoil
from tpurec.embeddings import SGD, check_on_device, dense_gradients, fuse, raise_offence
from tpurec.errors import DataError

# What the CPU itself refuses before or within the lookup: eagerly by name (test_jagged.py, test_fused.py), compiled in
# the op.
REFUSED = {False: {"id", "length", "capacity", "weight"}, True: {"capacity"}}
CASES = [(offence, compiled) for compiled in REFUSED for offence in OFFENCES if offence not in REFUSED[compiled]]


def step_of(collection, compiled):
    def step(features, factor):
        loss = (collection(features).values() * factor).sum()
        dense_gradients(loss, collection)
        return loss.detach()

    return torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step


def run(step, features, factor=1.0):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return step(features, torch.tensor(factor))


@pytest.fixture(scope="module")
def checked():
    """By whether it is compiled: a collection with its checks on, step, and weights; one compilation for all."""
    made = {}
    for compiled in (False, True):
        collection = make_collection("cpu")
        check_on_device(collection)
        made[compiled] = collection, step_of(collection, compiled), copy.deepcopy(collection.state_dict())
    return made


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("offence", "compiled"), CASES)
def test_the_first_offence_is_named(offence, compiled, checked):
    collection, step, weights = checked[compiled]
    collection.load_state_dict(weights)
    run(step, batch_with(None))
    raise_offence(collection)
    assert not torch.equal(collection.embedding_bags["a"].weight, weights["embedding_bags.a.weight"])
    features, factor = spoil(collection, offence)
    before = copy.deepcopy(collection.state_dict())
    run(step, features, factor)
    run(step, batch_with(None))  # changes no table either
    for name, weight in before.items():
        assert torch.equal(collection.state_dict()[name].nan_to_num(), weight.nan_to_num()), name
    with pytest.raises(DataError, match=OFFENCES[offence]):
        raise_offence(collection)
    raise_offence(collection)  # reported once


def test_off_is_as_if_there_were_none():
    """The default; also: on, a sound batch trains to the same bits."""
    plain, checked, off = (make_collection("cpu") for _ in range(3))
    check_on_device(checked)
    check_on_device(off)
    check_on_device(off, enabled=False)
    assert plain.device_checks is None
    assert off.device_checks is None
    for collection in (plain, checked, off):
        run(step_of(collection, compiled=False), batch_with(None))
        raise_offence(collection)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, checked.state_dict()[name])
        assert torch.equal(weight, off.state_dict()[name])


def test_checks_move_with_the_model_and_find_shared_collections_once():
    tables = [EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=5, feature_names=["f"])]
    model = fuse(torch.nn.Sequential(EmbeddingBagCollection(tables=tables)), SGD(lr=0.1))
    check_on_device(model)
    model.double()
    features = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    with torch.no_grad():
        model[0].embedding_bags["t"].weight[1, 3] = float("inf")
    model(features)
    with pytest.raises(DataError, match="feature 'f', table 't': the pooled vector of example 0 has inf"):
        raise_offence(model)


def test_without_examples_nothing_is_found():
    """Case 01."""
    collection = make_collection("cpu")
    check_on_device(collection)
    empty = torch.zeros(0, dtype=torch.int32)
    collection(KeyedJaggedTensor(["f1", "f2", "f3"], empty, weights=torch.zeros(0), lengths=empty))
    raise_offence(collection)
