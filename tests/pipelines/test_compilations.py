"""Programs are counted, timed, told, and judged."""

import pytest
import torch

from pipelines.compilations import Compilations
from pipelines.compiler import Compiler
from tests.pipelines.conftest import SCHEMA, click_rows
from tpurec.embeddings import to_torch
from tpurec.errors import TpurecError
from tpurec.features import Ladder, pack
from tpurec.features.transform import Transformer
from tpurec.sharding.routed import DeviceRoute, RoutedBatch, RoutedFeatures
from tpurec.sharding.routing import Sizes


def a_batch(capacity):
    return to_torch(pack(Transformer(SCHEMA)(click_rows(4)), 16, Ladder((capacity,))), static=True)


class Counted:
    """Compilations whose calls compile as many programs as they are told to."""

    def __init__(self, one_per_shape=True, on_recompile="warn"):
        self.programs = 0
        self.found = []
        self.waited = []
        self.compilations = Compilations(lambda: self.programs, one_per_shape, on_recompile, self.found.append)

    def __call__(self, capacity, programs, activity="training"):
        def call():
            self.programs += programs
            return capacity

        return self.compilations.watch(activity, a_batch(capacity), call, self.waited.append)


def test_only_a_call_that_compiles_is_waited_for_and_told():
    counted = Counted()
    assert [counted(16, 1), counted(16, 0), counted(24, 1), counted(24, 0)] == [
        (16, True),
        (16, False),
        (24, True),
        (24, False),
    ]
    assert counted.waited == [16, 24]
    assert [(found.capacities["tags"], found.batch_size, found.unexpected) for found in counted.found] == [
        (16, 16, ""),
        (24, 16, ""),
    ]
    assert counted.compilations.programs == 2 and counted.compilations.warnings() == []
    assert counted.compilations.seconds == sum(found.seconds for found in counted.found) > 0


def test_training_and_evaluation_have_a_program_each_of_the_same_shape():
    counted = Counted(on_recompile="error")
    counted(16, 1, "training")
    counted(16, 1, "evaluation")
    assert [found.activity for found in counted.found] == ["training", "evaluation"]
    with pytest.raises(TpurecError, match="evaluation compiled a program that it should not need"):
        counted(16, 1, "evaluation")


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([(16, 1), (24, 1), (16, 1)], "this shape has a program already"),
        ([(16, 2)], "2 programs for one shape"),
        ([(Ladder.for_batch(16).rungs[-1] + 8, 1)], r"feature 'user' has more than \d+ ids, the highest rung"),
    ],
)
def test_a_program_that_should_not_be_needed_is_a_warning_or_an_error(calls, reason):
    counted = Counted()
    for call in calls:
        counted(*call)
    assert counted.found[-1].unexpected and not any(found.unexpected for found in counted.found[:-1])
    assert "should not be needed, 1 times" in counted.compilations.warnings()[0]
    strict = Counted(on_recompile="error")
    for call in calls[:-1]:
        strict(*call)
    with pytest.raises(TpurecError, match=rf"should not need \(16 rows.*{reason}\. Set device\.on_recompile=warn"):
        strict(*calls[-1])
    assert strict.found[-1].unexpected  # told before it is raised


def test_where_operations_are_compiled_one_by_one_any_number_is_expected():
    counted = Counted(one_per_shape=False)
    for programs in (150, 20, 1):
        counted(16, programs)
    assert counted.compilations.programs == 171 and counted.compilations.warnings() == []


def test_what_is_compiled_between_two_calls_counts_for_the_next():
    """In torch_tpu's eager modes programs are compiled in the background."""
    counted = Counted(one_per_shape=False)
    counted(16, 1)
    counted.programs += 3
    counted(16, 0)
    assert [found.programs for found in counted.found] == [1, 3]


def test_more_programs_than_torchs_limit_of_8_are_made_and_counted():
    compiler = Compiler("aot_eager")
    double = compiler(lambda values: values * 2)
    for size in range(2, 14):
        assert double(torch.ones(size)).sum() == 2 * size
        assert double(torch.ones(size)).sum() == 2 * size
    assert compiler.programs == 12


def test_a_routed_batch_is_told_by_the_sizes_of_its_exchange_which_have_no_upper_limit():
    route = DeviceRoute(Sizes(8, 16, 0, 1 << 20), *[None] * 12)
    features = RoutedFeatures((route,), torch.zeros(2, 40), 4, 8, torch.zeros(1), 0, None, frozenset({0}))
    batch = RoutedBatch(None, features, None, None, 4, 8)
    counted = Counted(on_recompile="error")

    def call():
        counted.programs += 1

    counted.compilations.watch("training", batch, call, counted.waited.append)
    (found,) = counted.found
    assert found.batch_size == 4 and found.capacities["stack 0 local ids"] == 1 << 20
    with pytest.raises(TpurecError, match=r"this shape has a program already"):
        counted.compilations.watch("training", batch, call, counted.waited.append)
