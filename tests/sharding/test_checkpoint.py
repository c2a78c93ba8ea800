"""Checkpoints: exact, complete or absent, and strict about names."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tpurec.sharding import checkpoint, checkpoint_folder, safetensors_storage
from tpurec.sharding.checkpoint import (
    MANIFEST,
    Checkpointer,
    CheckpointError,
    best_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from tpurec.sharding.checkpoint_manifest import sealed


def some_tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.table.weight": torch.randn(1000, 8, generator=generator) * scale,
        "model.bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "optimizer.table.sum": torch.rand(1000, generator=generator, dtype=torch.float64),
        "optimizer.dense.step": torch.tensor(7.0),
        "rng.torch": torch.arange(11, dtype=torch.uint8),
        "model.half": torch.randn(5, 3, generator=generator).half(),
        "model.empty": torch.empty(0, 4),
        "model.flags": torch.tensor([True, False, True]),
        "model.ids": torch.arange(5),
    }


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("block_bytes", [16 << 20, 100, 1])
def test_tensors_and_state_come_back_bit_for_bit(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(safetensors_storage, "BLOCK_BYTES", block_bytes)
    tensors = some_tensors()
    state = {"epoch": 1, "loss": 0.1 + 0.2, "seen": [1, 2]}
    folder = Checkpointer(tmp_path, keep_last=1).save(12, tensors, state, score=-0.5)
    loaded = zeros_like(tensors)
    places = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    manifest = load_checkpoint(folder, loaded)
    assert (manifest.step, manifest.score, manifest.state) == (12, -0.5, state)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype, name
        assert loaded[name].data_ptr() == places[name], "loading is in place"


def test_the_files_are_plain_safetensors_that_anyone_can_open_and_hold_no_pickle(tmp_path):
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    with safe_open(next(folder.glob("*.safetensors")), framework="pt") as stream:
        assert set(stream.keys()) == set(some_tensors())
        assert torch.equal(stream.get_tensor("model.table.weight"), some_tensors()["model.table.weight"])


def test_pytorchs_own_reader_reads_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    loaded = zeros_like(some_tensors())
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(loaded["optimizer.table.sum"], some_tensors()["optimizer.table.sum"])


def test_missing_and_extra_optimizer_state_are_named_and_nothing_is_loaded(tmp_path):
    """case 23"""
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    wanted = zeros_like(some_tensors())
    wanted["optimizer.other.sum"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"lacks 'optimizer\.other\.sum'"):
        load_checkpoint(folder, wanted)
    del wanted["optimizer.other.sum"], wanted["optimizer.table.sum"]
    with pytest.raises(CheckpointError, match=r"has 'optimizer\.table\.sum', which nothing here takes"):
        load_checkpoint(folder, wanted)
    assert all((tensor == 0).all() for tensor in wanted.values())


@pytest.mark.parametrize("other", [torch.zeros(1001, 8), torch.zeros(1000, 8, dtype=torch.float64)])
def test_another_shape_or_dtype_is_named(tmp_path, other):
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    with pytest.raises(CheckpointError, match=r"'model\.table\.weight' is float32 \[1000, 8\], here it is"):
        load_checkpoint(folder, zeros_like(some_tensors()) | {"model.table.weight": other})


def test_a_prefix_loads_the_model_alone(tmp_path):
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    model = {name: tensor for name, tensor in zeros_like(some_tensors()).items() if name.startswith("model.")}
    load_checkpoint(folder, model, only="model.")
    assert torch.equal(model["model.bias"], some_tensors()["model.bias"])


def test_a_damaged_file_is_named(tmp_path):
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: its contents changed"):
        load_checkpoint(folder, zeros_like(some_tensors()))
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: \d+ bytes, \d+ bytes are expected"):
        load_checkpoint(folder, zeros_like(some_tensors()))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: missing"):
        load_checkpoint(folder, zeros_like(some_tensors()))
    (folder / MANIFEST).write_text('{"version": 1, "step"')
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        load_checkpoint(folder, zeros_like(some_tensors()))
    (folder / MANIFEST).write_text('{"version": 99}')
    with pytest.raises(CheckpointError, match="format version 99; this software reads versions 1 and 2"):
        read_manifest(folder)


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path, kind):
    tensors = some_tensors()
    path = Checkpointer(tmp_path / "checkpoints", keep_last=1).save(1, tensors, {})
    manifest = json.loads((path / "manifest.json").read_text())
    name = next(iter(manifest["files"]))
    outside = tmp_path / "outside.safetensors"
    (path / name).rename(outside)
    if kind == "link":
        (path / name).symlink_to(outside)
    else:
        named = "../../outside.safetensors" if kind == "parent" else str(outside)
        (path / "manifest.json").write_text(sealed(json.dumps(manifest).replace(name, named)[:-1]))
    with pytest.raises(CheckpointError, match="lies outside"):
        load_checkpoint(path, zeros_like(tensors))


def test_a_manifest_that_is_a_link_is_refused(tmp_path):
    path = Checkpointer(tmp_path / "checkpoints", keep_last=1).save(1, some_tensors(), {})
    outside = (path / MANIFEST).rename(tmp_path / "outside.json")
    (path / MANIFEST).symlink_to(outside)
    for read in (read_manifest, verify_checkpoint, lambda folder: load_checkpoint(folder, zeros_like(some_tensors()))):
        with pytest.raises(CheckpointError, match=r"manifest\.json: is a link"):
            read(path)


def test_what_is_no_folder_with_a_manifest_in_it_is_named(tmp_path):
    path = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: not a checkpoint"):
        load_checkpoint(path / "rank-00000.safetensors", zeros_like(some_tensors()))
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: Is a directory"):
        read_manifest(path)


def test_of_a_checkpoint_that_was_moved_and_linked_the_link_is_pruned(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    checkpointer = Checkpointer(folder, keep_last=1)
    path = checkpointer.save(1, some_tensors(), {})
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    checkpointer.save(2, some_tensors(), {})
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    verify_checkpoint(elsewhere)
    (folder / ".unfinished-removed-step-00000001").symlink_to(elsewhere)  # what killed runs may have left
    Checkpointer(folder, keep_last=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_what_loading_returns_is_short_when_it_is_shown(tmp_path):
    tensors = {f"model.{number}": torch.zeros(1) for number in range(100)}
    path = Checkpointer(tmp_path, keep_last=1).save(7, tensors, {})
    shown = repr(load_checkpoint(path, tensors))
    assert len(shown) < 300 and "step=7" in shown


def test_the_last_few_and_the_best_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for step, score in [(1, None), (2, -0.4), (3, -0.3), (4, -0.3), (5, -0.9), (6, None)]:
        checkpointer.save(step, {"x": torch.tensor(float(step))}, {}, score)
    assert [read_manifest(path).step for path in list_checkpoints(tmp_path)] == [3, 5, 6]
    assert read_manifest(best_checkpoint(tmp_path)).step == 3


def test_the_best_is_found_without_parsing_manifests_and_a_damaged_score_is_named(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    for step, score in [(1, -0.25), (2, None), (3, -1e-3)]:
        checkpointer.save(step, {"x": torch.tensor(1.0)}, {}, score)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "read_manifest", None)
        assert best_checkpoint(tmp_path).name == "step-00000003"
    path = tmp_path / "step-00000001" / MANIFEST
    path.write_text(path.read_text().replace("-0.25", "-0.2x"))
    with pytest.raises(CheckpointError, match=r"step-00000001/manifest\.json: damaged"):
        best_checkpoint(tmp_path)


def test_a_checkpoint_that_its_owner_removes_meanwhile_is_not_the_best(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    for step, score in [(1, 0.5), (2, 0.25)]:
        checkpointer.save(step, {"x": torch.tensor(1.0)}, {}, score)
    listed = list_checkpoints(tmp_path)
    shutil.rmtree(listed[0])
    monkeypatch.setattr(checkpoint_folder, "list_checkpoints", lambda folder: listed)
    assert best_checkpoint(tmp_path) == listed[1]
    with pytest.raises(CheckpointError, match="step-00000001: not a checkpoint"):
        load_checkpoint(listed[0], {"x": torch.tensor(0.0)})


def test_without_scores_the_newest_is_the_best(tmp_path):
    assert best_checkpoint(tmp_path / "nothing") is None
    checkpointer = Checkpointer(tmp_path, keep_last=3)
    for step in (1, 2):
        checkpointer.save(step, {"x": torch.tensor(1.0)}, {})
    assert read_manifest(best_checkpoint(tmp_path)).step == 2


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    for value in (1.0, 2.0):
        folder = checkpointer.save(5, {"x": torch.tensor(value)}, {})
    loaded = {"x": torch.tensor(0.0)}
    load_checkpoint(folder, loaded)
    assert loaded["x"] == 2.0 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("killed_at", ["unfinished", "final", "nowhere"])
def test_killed_while_a_checkpoint_of_the_same_step_is_replaced_one_of_them_is_there(tmp_path, monkeypatch, killed_at):
    """case 24"""

    class Killed(BaseException):
        pass

    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(5, {"x": torch.tensor(1.0)}, {})
    original = Path.rename

    def rename(self, target):
        original(self, target)
        if killed_at == "final" and self.name == "step-00000005":
            raise Killed
        if killed_at == "unfinished" and self.name == ".unfinished-step-00000005":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(checkpoint, "give_up", lambda final: None)  # a killed process tidies nothing up
        if killed_at == "nowhere":
            checkpointer.save(5, {"x": torch.tensor(2.0)}, {})
        else:
            with pytest.raises(Killed):
                checkpointer.save(5, {"x": torch.tensor(2.0)}, {})
    Checkpointer(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    loaded = {"x": torch.tensor(0.0)}
    load_checkpoint(tmp_path / "step-00000005", loaded)
    assert loaded["x"] == (1.0 if killed_at == "final" else 2.0)


def test_a_failure_while_one_of_the_same_step_is_replaced_keeps_that(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(5, {"x": torch.tensor(1.0)}, {})
    original = Path.rename

    def rename(self, target):
        if self.name.startswith(".unfinished-step"):
            raise OSError(5, "Input/output error")
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpointer.save(5, {"x": torch.tensor(2.0)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    loaded = {"x": torch.tensor(0.0)}
    load_checkpoint(tmp_path / "step-00000005", loaded)
    assert loaded["x"] == 1.0


def test_an_interrupted_save_leaves_nothing_and_the_last_complete_one_loads(tmp_path, monkeypatch):
    """case 24"""
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    checkpointer.save(1, some_tensors(), {})

    for interrupt, seen in [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), CheckpointError)]:

        def fail(*_, interrupt=interrupt):
            raise interrupt

        monkeypatch.setattr(safetensors_storage, "_write", fail)
        with pytest.raises(seen):
            checkpointer.save(2, some_tensors(2.0), {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_state_that_is_no_json_is_refused_before_the_checkpoint_appears(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {"loss": float("nan")})
    assert list_checkpoints(tmp_path) == [] and list(tmp_path.iterdir()) == []


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from tpurec.sharding.checkpoint import Checkpointer
checkpointer = Checkpointer(Path(sys.argv[1]), keep_last=2)
step = 0
while True:
    step += 1
    checkpointer.save(step, {"x": torch.full((200_000, 16), float(step))}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.multiprocess
def test_killed_while_saving_the_last_complete_checkpoint_loads(tmp_path):
    """case 24: SIGKILL at several moments of the saving loop"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for delay in (0.0, 0.01, 0.02, 0.04):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3):
            finished = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        newest = list_checkpoints(tmp_path)[-1]
        loaded = {"x": torch.zeros(200_000, 16)}
        manifest = load_checkpoint(newest, loaded)
        assert manifest.step >= finished
        assert (loaded["x"] == manifest.state["step"]).all()
    Checkpointer(tmp_path, keep_last=2)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir()), "leftovers of a killed owner are removed"


def _save_and_report_peak(folder: str, result) -> None:
    import resource
    from pathlib import Path

    tensors = {"table": torch.ones(40_000_000)}  # 160 MB
    checkpointer = Checkpointer(Path(folder), keep_last=1)
    checkpointer.save(1, {"table": torch.ones(10)}, {})  # warm up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpointer.save(2, tensors, {})
    result.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.multiprocess
def test_saving_needs_no_second_copy_of_a_table(tmp_path):
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_save_and_report_peak, args=(str(tmp_path), result))
    process.start()
    grown_kib = result.get(timeout=120)
    process.join()
    assert grown_kib < 80_000, f"peak memory grew by {grown_kib} KiB while a table of 160 MB was saved"


def test_the_manifest_is_readable_by_people_and_other_programs(tmp_path):
    folder = Checkpointer(tmp_path, keep_last=1).save(3, some_tensors(), {"epoch": 0})
    values = json.loads((folder / MANIFEST).read_text())
    weight = values["tensors"]["model.table.weight"]
    assert (weight["dtype"], weight["shape"]) == ("float32", [1000, 8])
    (piece,) = weight["pieces"]
    assert (piece["file"], piece["rows"], piece["columns"]) == ("rank-00000.safetensors", [0, 1, 1000], [0, 8])
    assert set(values["files"]) == {"rank-00000.safetensors"}


def test_a_folder_may_be_given_as_text(tmp_path):
    folder = Checkpointer(tmp_path, keep_last=1).save(1, some_tensors(), {})
    loaded = zeros_like(some_tensors())
    load_checkpoint(str(folder), loaded)
    assert torch.equal(loaded["model.table.weight"], some_tensors()["model.table.weight"])
    assert verify_checkpoint(str(folder)).folder == folder
