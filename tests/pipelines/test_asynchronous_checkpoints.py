"""A run whose checkpoints a thread writes: the same numbers as one that waits for them, killed or not."""

import signal

import pytest

from pipelines.recipe import read_recipe
from pipelines.run import Run
from tests.pipelines.conftest import RECIPE
from tests.pipelines.test_train_command import start, tpurec, until_checkpoint
from tests.pipelines.test_training import Killed, lines, numbers, train
from tpurec.sharding import checkpoint_part
from tpurec.sharding.checkpoint import CheckpointError, list_checkpoints

ASYNCHRONOUS = ["checkpoint.asynchronous=true"]


@pytest.fixture(scope="module")
def waiting(clicks, tmp_path_factory):
    """A run that waits for its checkpoints: recipe, folder and result."""
    folder = tmp_path_factory.mktemp("waiting")
    recipe_file = folder / "recipe.toml"
    recipe_file.write_text(RECIPE.format(data=clicks))
    run = Run(folder / "run")
    return recipe_file, run, train(run, read_recipe(recipe_file))


@pytest.mark.parametrize("kills", [[], [23], [36, 31]])
def test_killed_and_resumed_it_gives_the_numbers_of_one_that_waits(waiting, tmp_path, kills):
    recipe_file, other, result = waiting
    run = Run(tmp_path / "run")
    for number, kill in enumerate(kills):
        with pytest.raises(Killed):
            train(run, read_recipe(recipe_file, ASYNCHRONOUS if number == 0 else []), kill_at=kill)
        assert all(path.name.startswith("step-") for path in run.checkpoints.iterdir()), "nothing half-written is left"
    assert numbers(train(run, read_recipe(recipe_file, ASYNCHRONOUS))) == numbers(result)
    assert lines(run) == lines(other)
    kept = [path.name for path in list_checkpoints(run.checkpoints)]
    assert kept == [path.name for path in list_checkpoints(other.checkpoints)]
    if not kills:  # what it wrote is what the other wrote, to the byte
        for name in kept:
            files = [(r.checkpoints / name / "rank-00000.safetensors").read_bytes() for r in (run, other)]
            assert files[0] == files[1]


def test_a_disk_that_fills_up_ends_the_run_at_the_next_checkpoint(waiting, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    original = checkpoint_part.write_file

    def write(path, *more):
        if "step-00000020" in str(path):
            raise OSError(28, "No space left on device")
        return original(path, *more)

    monkeypatch.setattr(checkpoint_part, "write_file", write)
    with pytest.raises(CheckpointError, match=r"step-00000020: cannot be written: \[Errno 28\] No space left"):
        train(run, read_recipe(waiting[0], ASYNCHRONOUS))
    assert list_checkpoints(run.checkpoints)[-1].name == "step-00000015"
    monkeypatch.undo()
    assert numbers(train(run, read_recipe(waiting[0]))) == numbers(waiting[2])


@pytest.mark.multiprocess
def test_killed_with_sigkill_while_it_trains_and_rerun_it_gives_the_same_numbers(waiting, tmp_path):
    """cases 24, 25, asynchronous"""
    recipe_file, _, result = waiting
    run = Run(tmp_path / "run")
    process = start("train", recipe_file, "--out", run.path, "--set", *ASYNCHRONOUS)
    until_checkpoint(process, run, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    resumed, err = tpurec("train", recipe_file, "--out", run.path, "--set", *ASYNCHRONOUS)
    assert "resuming at step" in err
    assert {key: resumed[key] for key in ("auc", "log_loss", "rows_seen", "steps", "best_step")} == {
        key: result[key] for key in ("auc", "log_loss", "rows_seen", "steps", "best_step")
    }
