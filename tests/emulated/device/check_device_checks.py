"""The debug aid on the device: each kind of offence is named, eagerly and from within the compiled step."""

import pytest
import torch

from pipelines.recipe import read_recipe
from pipelines.run import Run
from tests.embeddings.offences import OFFENCES, batch_with, make_collection, spoil
from tests.emulated import runtime
from tests.emulated.runtime import Kind
from tests.pipelines.conftest import RECIPE, clicks  # noqa: F401  (a fixture)
from tests.pipelines.test_training import train
from tpurec.embeddings import check_on_device, dense_gradients, raise_offence
from tpurec.errors import DataError


def step_of(collection, compiled):
    def step(features, factor):
        loss = (collection(features).values() * factor).sum()
        dense_gradients(loss, collection)
        return loss.detach()

    compiled_step = torch.compile(step, backend="tpu", fullgraph=True, dynamic=False) if compiled else step

    def run(features, factor):
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled_step(features, torch.tensor(factor).to("tpu"))

    return run


@pytest.fixture(scope="module")
def checked():
    made = {}
    for compiled in (False, True):
        collection = make_collection("tpu")
        check_on_device(collection)
        weights = {name: weight.cpu() for name, weight in collection.state_dict().items()}
        made[compiled] = collection, step_of(collection, compiled), weights
    return made


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("offence", OFFENCES)
def test_the_first_offence_is_named(offence, compiled, checked):
    collection, step, weights = checked[compiled]
    collection.load_state_dict(weights)
    step(batch_with(None, "tpu"), 1.0)
    raise_offence(collection)
    assert not torch.equal(collection.embedding_bags["a"].weight.cpu(), weights["embedding_bags.a.weight"])
    features, factor = spoil(collection, offence)
    before = {name: weight.cpu().nan_to_num() for name, weight in collection.state_dict().items()}
    step(features, factor)
    step(batch_with(None, "tpu"), 1.0)  # changes no table either
    for name, weight in before.items():
        assert torch.equal(collection.state_dict()[name].cpu().nan_to_num(), weight), name
    with pytest.raises(DataError, match=OFFENCES[offence]):
        raise_offence(collection)
    raise_offence(collection)  # reported once


def test_a_compact_batch_whose_lengths_do_not_fit():
    from torchrec import KeyedJaggedTensor

    collection = make_collection("tpu")
    check_on_device(collection)
    lengths = torch.tensor([1, 1, 1, 1, 1, 2], dtype=torch.int32)
    ids, weights = torch.tensor([1, 2, 3, 60, 5, 6], dtype=torch.int32), torch.ones(6)
    collection(KeyedJaggedTensor(["f1", "f2", "f3"], ids, weights=weights, lengths=lengths).to("tpu"))
    with pytest.raises(DataError, match=r"feature 'f2', table 'b': id 60 \(value 1 of the feature\)"):
        raise_offence(collection)
    ids[3] = 4
    for count, message in (
        (6, "'f3', table 'b': lengths of examples 0 to 1 sum to 3"),
        (8, "sum to 7, but there are 8"),
    ):
        ids, weights = torch.zeros(count, dtype=torch.int32), torch.ones(count)
        features = KeyedJaggedTensor(["f1", "f2", "f3"], ids.to("tpu"), weights.to("tpu"), lengths.to("tpu"), stride=2)
        collection(features)
        with pytest.raises(DataError, match=message):
            raise_offence(collection)


def test_on_they_cost_one_read_a_step_and_off_the_program_is_the_same():
    """Off: the compiled step has as many operations as in a collection that never had checks."""
    programs = []
    for switched in (False, True):
        torch._dynamo.reset()
        collection = make_collection("tpu")
        if switched:
            check_on_device(collection)
            check_on_device(collection, enabled=False)
        features = batch_with(None, "tpu")
        torch.accelerator.synchronize()
        graphs = []

        def keep(module, inputs, graphs=graphs):
            graphs.append(len(module.graph.nodes))
            return module.forward

        def step(features, collection=collection):
            loss = collection(features).values().sum()
            dense_gradients(loss, collection)
            return loss.detach()

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            torch.compile(step, backend=keep, fullgraph=True, dynamic=False)(features)
        programs.append(graphs)
    assert programs[0] == programs[1]
    check_on_device(collection)
    collection(features)
    torch.accelerator.synchronize()
    runtime.record()
    raise_offence(collection)
    assert runtime.recorded() == [(Kind.TO_HOST, 48)]


def test_a_compiled_run_of_a_recipe_ends_with_the_first_offence(clicks, tmp_path):  # noqa: F811
    """Training and evaluation; sound data pass, tables that overflow do not."""
    recipe_file = tmp_path / "recipe.toml"
    recipe_file.write_text(RECIPE.format(data=clicks))
    settings = ["device.kind='tpu'", "device.check=true", "train.max_steps=2"]
    result = train(Run(tmp_path / "sound"), read_recipe(recipe_file, settings))
    assert result["steps"] == 2
    settings += ["tables.learning_rate=1e38", "train.warmup_steps=0", "train.max_steps=4"]
    with pytest.raises(DataError, match=r"step \d+: feature '\w+', table '\w+': the \w+( vector)? of example \d+ has"):
        train(Run(tmp_path / "unsound"), read_recipe(recipe_file, settings))
