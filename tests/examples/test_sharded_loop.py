"""The loop that docs/sharded_training.md points to trains, on two ranks, to the losses that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\d\.\d+)", text)}


@pytest.mark.multiprocess
def test_two_ranks_print_the_losses_of_the_page():
    page = (ROOT / "docs" / "sharded_training.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "examples.sharded_loop"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "user: row_wise" in done.stdout
    shown = _losses(page)
    assert len(shown) == 4
    assert _losses(done.stdout) == pytest.approx(shown, abs=2e-3)
