"""Two ranks whose tables are on the emulated TPU train as the unsharded model does on the CPU.

Tables lie there in tensors that are far smaller than the tables, as those above 16 GiB do on a TPU. The collectives go
by way of the host (gloo): what a slice makes of them is not shown here. Tolerances are of float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sharding.exchange_cases import Case, Table, unsharded
from tests.sharding.world import World
from tpurec.sharding.checkpoint import load_checkpoint

from .sharded_steps import ready, train

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(900)]
TENSOR_BYTES = 4096  # the smallest there is: 128 rows of 8 columns
CASES = {
    # Adagrad's accumulators are as large as the tables, and cut like them.
    "cut stacks": Case(
        (
            Table(300, 8, "table_wise", (2,)),
            Table(401, 8, "unique_rows", (3,), "mean"),
            Table(150, 16, "partial_pools", (4,)),
            Table(141, 8, "data_parallel", (1,)),
        ),
        "adagrad",
        weighted=True,
        steps=2,
    ),
    # Sums over whole rows for clipping, L2 decay and the accumulator per row; another accumulator per element.
    "columns": Case(
        (Table(300, 16, "column_wise:2", (1,)), Table(181, 32, "column_wise:2", (4, 2), "mean")),
        "clipped_rowwise_adam",
        steps=2,
    ),
    # A vector an id, with places behind the last one and zeros for skipped ids.
    "sequences": Case(
        (
            Table(300, 16, "unique_rows", (3,), "none"),
            Table(300, 16, "column_wise:2", (2,), "none"),
            Table(141, 16, "data_parallel", (1,), "none"),
        ),
        "adagrad",
        steps=1,
        skipped=0.2,
    ),
}


@pytest.fixture(scope="module")
def world(emulator: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(2, tmp_path_factory.mktemp("world"), patience=600)
    started.run(ready)
    yield started
    started.close()


def whole_of(answers: list[dict], key: str) -> dict[str, torch.Tensor]:
    """Every tensor put together from the pieces that its owners write."""
    found: dict[str, torch.Tensor] = {}
    for name, shape, start, step, columns, writes, tensor in (piece for answer in answers for piece in answer[key]):
        whole = found.setdefault(name, torch.full(shape, float("nan")))
        if not shape:
            whole.copy_(tensor)
        elif writes:
            for number, row in enumerate(tensor):
                target = whole[start + number * step]
                (target if columns is None else target[slice(*columns)]).copy_(row)
    return found


@pytest.mark.parametrize("name", CASES)
def test_sharded_tables_on_a_tpu_train_as_unsharded_ones_and_go_through_a_checkpoint(world, tmp_path, name):
    case = CASES[name]
    answers, wanted = world.run(train, case, TENSOR_BYTES, str(tmp_path)), unsharded(case)
    start = unsharded(Case(case.tables, case.optimizer, case.weighted, steps=0))["tensors"]
    assert all(parts > 1 for parts in answers[0]["parts"]), "no stack is cut; the case proves nothing"
    more = {"adagrad": 0, "clipped_rowwise_adam": 2}[case.optimizer]  # an accumulator per row, and the count of steps
    assert answers[0]["states"] == [parts + more for parts in answers[0]["parts"]]
    for one, other in zip(answers[0]["losses"], wanted["losses"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    trained, loaded = whole_of(answers, "pieces"), whole_of(answers, "loaded")
    tables = {key: tensor for key, tensor in wanted["tensors"].items() if key.split(".")[1] == "embeddings"}
    assert trained.keys() == tables.keys() == loaded.keys()
    for key, tensor in tables.items():
        torch.testing.assert_close(trained[key], tensor.float(), rtol=1e-4, atol=2e-6, msg=key)
        assert not torch.equal(tensor, start[key]), f"{key} was not trained"
        assert torch.equal(loaded[key], trained[key]), f"{key} came back otherwise"
    # The checkpoint is that of the unsharded model: a process without a TPU reads it.
    plain = {key: torch.full_like(tensor, -1) for key, tensor in tables.items()}
    load_checkpoint(answers[0]["folder"], plain, partial=True)
    assert all(torch.equal(plain[key].float(), trained[key]) for key in tables)
