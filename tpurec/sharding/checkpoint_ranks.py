"""The ranks that write one checkpoint together: each does its part, and either all succeed or all fail.

What they tell each other is JSON over a gloo group of its own, so that a thread can write while training communicates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tpurec.sharding.checkpoint_manifest import CheckpointError

T = TypeVar("T")


class Ranks:
    """This process among those that write a checkpoint.

    Args:
        process_group: those; every one of them makes this object. None for this process alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if process_group is not None and process_group.size() > 1:
            members = dist.get_process_group_ranks(process_group)
            self._group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            self._first = members[0]
            self.rank, self.size = process_group.rank(), process_group.size()

    def together(self, what: str, action: Callable[[], Any], conclude: Callable[[list[Any]], T]) -> T:
        """Let every rank do its part, and rank 0 conclude from what all of them give.

        Args:
            what: what fails, in errors.
            action: this rank's part; gives JSON.
            conclude: run by rank 0 on what the ranks gave, by rank; gives JSON.

        Returns:
            What rank 0 concluded, on every rank.

        Raises:
            CheckpointError: on every rank, if the part of any rank failed or a rank is gone. An interrupt stays one
                on the rank that was interrupted.
        """
        own: BaseException | None = None
        outcome: dict[str, Any] = {}
        try:
            outcome["given"] = action()
        except BaseException as error:
            own = error
            outcome = _describe(error)
        verdict: dict[str, Any] = {}
        outcomes = self._collect(what, outcome)
        if outcomes is not None:
            failed = [{"rank": rank, **entry} for rank, entry in enumerate(outcomes) if "problem" in entry]
            if failed:
                verdict = failed[0]
            else:
                try:
                    verdict = {"concluded": conclude([entry["given"] for entry in outcomes])}
                except BaseException as error:
                    own = error
                    verdict = {"rank": None, **_describe(error)}
        verdict = self._share(what, verdict)
        if "problem" not in verdict:
            return verdict["concluded"]
        if own is not None and not isinstance(own, (CheckpointError, OSError, RuntimeError)):
            raise own
        where = f"rank {verdict['rank']}: " if self.size > 1 and verdict["rank"] is not None else ""
        raise CheckpointError(f"{what}: {where}{verdict['problem'].rstrip('.')}.", verdict["remedy"]) from own

    def _collect(self, what: str, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        """On rank 0 what every rank gave; elsewhere None."""
        if self._group is None:
            return [value]
        data = json.dumps(value).encode()
        with _peers(what):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = max(int(size) for size in sizes)
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(own, parts, dst=self._first, group=self._group)
        if parts is None:
            return None
        texts = [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def _share(self, what: str, value: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 has, on every rank."""
        if self._group is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        with _peers(what):
            size = torch.tensor([len(data)])
            dist.broadcast(size, self._first, group=self._group)
            shared = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None
            if shared is None:
                shared = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(shared, self._first, group=self._group)
        return json.loads(bytes(shared.numpy()))


class _peers:
    """Name what it means when a collective fails."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"{self._what}: another rank is gone: {str(error).splitlines()[0]}") from error


def _describe(error: BaseException) -> dict[str, Any]:
    problem = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    return {"problem": getattr(error, "problem", problem), "remedy": getattr(error, "remedy", "")}
