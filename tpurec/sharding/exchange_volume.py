"""What an exchange carries, counted without running it: the router's own sizes for every rank of a slice of any size.

The router (`tpurec.sharding.routing`) settles all shapes of a step on the host, so one process can ask it rank after
rank what it needs, agree the sizes as the ranks would, and say what every collective will carry, to the byte.
`benchmarks/scale.py` compares the answer with counts of real process groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import dtype as Dtype
from torchrec import EmbeddingBagConfig

from tpurec.embeddings.optimizers import EmbeddingOptimizer
from tpurec.embeddings.stack import dtype_of
from tpurec.errors import DataError
from tpurec.sharding.column_squares import num_sums
from tpurec.sharding.placement import make_stacks, tables_of
from tpurec.sharding.plan import Plan
from tpurec.sharding.routing import HostBatch, StackRouter, raise_to_rungs, sizes_of


@dataclass(frozen=True)
class StepVolume:
    """One step's exchange.

    Args:
        bytes: that leave one rank, by kind of collective, as `tpurec.sharding.wire` counts them: an all-to-all sends
            all but its own share, an all-reduce counts as its ring form.
        padding_share: of the elements of ids, lengths, weights and vectors of all ranks, those that are padding.
        unique_share: distinct rows / ids, of tables whose rows travel or are everywhere; 1 if there is none.
        num_ids: ids of all ranks, one per feature and table that it looks up.
    """

    bytes: dict[str, float]
    padding_share: float
    unique_share: float
    num_ids: int

    @property
    def exchange_bytes(self) -> float:
        """Bytes that leave one rank in a step."""
        return sum(self.bytes.values())


class ExchangeVolume:
    """Counts the steps of one model under one plan; sizes never shrink from step to step, as in training.

    Args:
        configs: the tables of one collection.
        optimizer: of the tables.
        plan: where they are.
        is_weighted: whether each id has a weight.
        dense_elements: of the dense part's gradients, which are added up over ranks.
        wire_bytes: of an element of vectors and gradients: 4 for float32, 2 for bfloat16.

    Raises:
        ConfigError: the plan is for other tables, or cannot be executed.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        optimizer: EmbeddingOptimizer,
        plan: Plan,
        *,
        is_weighted: bool = False,
        dense_elements: int = 0,
        wire_bytes: int = 4,
    ) -> None:
        self.num_ranks = plan.topology.num_ranks
        dtypes: list[Dtype] = [dtype_of(config) for config in configs]
        self._tables = tables_of(plan, [(list(configs), dtypes, [False] * len(configs))])
        self._stacks = make_stacks(self._tables, [optimizer], self.num_ranks)
        self._routers = [StackRouter(stack, self._tables, self.num_ranks, is_weighted) for stack in self._stacks]
        self._sizes = np.zeros(sum(router.num_needs for router in self._routers), dtype=np.int64)
        self._squared = sorted({place.table for stack in self._stacks if stack.squares for place in stack.places})
        self._areas = np.zeros(len(self._squared), dtype=np.int64)
        self._padded_size = 0
        self._wire_bytes = wire_bytes
        replicated = sum(
            (stack.num_replicated + 1) * (stack.width + 1) for stack in self._stacks if stack.num_replicated
        )
        self._reduced_elements = dense_elements + replicated

    def step(self, batches: Iterable[HostBatch]) -> StepVolume:
        """Count one step.

        Args:
            batches: of every rank, in order; one at a time is held.

        Returns:
            The volume.

        Raises:
            DataError: not as many batches as the plan has ranks.
        """
        needs = np.zeros_like(self._sizes)
        areas = np.zeros(len(self._squared), dtype=np.int64)
        used_message = used_vectors = unique = looked_up = num_ids = padded_size = num_batches = 0
        for batch in batches:
            num_batches += 1
            padded_size = max(padded_size, batch.num_examples)
            num_ids += sum(len(batch.values[name]) for table in self._tables for name in table.config.feature_names)
            for at, number in enumerate(self._squared):
                areas[at] += sum(len(batch.values[name]) for name in self._tables[number].config.feature_names)
            routings = [router.route(batch) for router in self._routers]
            np.maximum(needs, [need for routing in routings for need in routing.needs], out=needs)
            for router, routing in zip(self._routers, routings, strict=True):
                message, lines = routing.used(batch.num_examples)
                used_message, used_vectors = used_message + message, used_vectors + lines * router.stack.width
                rows, ids = routing.num_unique
                unique, looked_up = unique + rows, looked_up + ids
        if num_batches != self.num_ranks:
            raise DataError(f"{num_batches} batches for a plan of {self.num_ranks} ranks.", "Give each rank one.")
        self._padded_size = padded_size = max(self._padded_size, padded_size)
        raise_to_rungs(self._sizes, needs)
        limits = np.array([self._tables[number].config.num_embeddings for number in self._squared], dtype=np.int64)
        raise_to_rungs(self._areas, np.minimum(areas, limits))
        sizes = sizes_of(self._routers, self._sizes)
        message = sum(router.message_size(size, padded_size) for router, size in zip(self._routers, sizes, strict=True))
        vectors = sum(
            (size.rows + stack.num_answers * padded_size) * stack.width
            for stack, size in zip(self._stacks, sizes, strict=True)
        )
        return StepVolume(
            self._bytes(message, vectors),
            1 - (used_message + used_vectors) / max(1, self.num_ranks**2 * (message + vectors)),
            unique / looked_up if looked_up else 1.0,
            num_ids,
        )

    def _bytes(self, message: int, vectors: int) -> dict[str, float]:
        others = self.num_ranks - 1
        found = {"ids": 4.0 * message * others, "vectors": float(self._wire_bytes * vectors * others)}
        found["gradients"] = found["vectors"]
        ring = 2 * others / self.num_ranks
        if self._squared:
            found["squares"] = 4.0 * (int(self._areas.sum()) + 1) * num_sums(self._stacks) * ring
        if self._reduced_elements:
            found["dense_gradients"] = 4.0 * self._reduced_elements * ring
        return found
