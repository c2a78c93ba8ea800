"""Several processes with a gloo group that run one function after the other, so that a world is started once."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    import os

    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        function, arguments = order
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class World:
    """Ranks that wait for work.

    Args:
        num_ranks: processes.
        folder: for the rendezvous file.
        patience: seconds that a rank may take for an answer.
    """

    def __init__(self, num_ranks: int, folder: Path, patience: int = 120) -> None:
        self.num_ranks, self._patience = num_ranks, patience
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, str(folder / "store"), there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a module-level function on every rank.

        Args:
            function: called as `function(rank, *arguments)`.
            arguments: the same for every rank.

        Returns:
            What each rank returned.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._patience):
                raise AssertionError(f"rank {rank} of {self.num_ranks} did not answer within {self._patience} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
