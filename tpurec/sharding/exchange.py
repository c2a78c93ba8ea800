"""One step's exchange on the device: ids out, vectors back, gradients out, and the optimizer step on the owners.

Shapes are those that the hosts agreed (`tpurec.sharding.routing`); nothing here looks at a value, so no step waits for
the host. `docs/sharded_training.md` draws the data flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpurec.errors import TpurecError
from tpurec.kernels.limits import MAX_TENSOR_BYTES
from tpurec.ops import embedding_bag, embedding_update_
from tpurec.sharding.arrange import Answers, Arrangement
from tpurec.sharding.column_squares import ColumnSquares, num_sums
from tpurec.sharding.placement import ShardedTable, Stack
from tpurec.sharding.routed import DeviceRoute, RoutedFeatures
from tpurec.sharding.sequences import SequenceArrangement, sequence_vectors
from tpurec.sharding.storage import StackStorage
from tpurec.sharding.wire import Wire


@dataclass(frozen=True)
class _Request:
    """What the ranks ask a stack of this rank for, as the ops take it."""

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None
    num_ids: int  # without those of replicated rows
    num_lines: int


class Exchange:
    """Runs the exchange of all sharded collections of a model.

    Args:
        tables: of the model.
        stacks: their layout.
        num_collections: collections.
        wire: the process group.
        device: of the tables.
        wire_dtype: of vectors and gradients between ranks: float32 (float64 if tables are), or bfloat16.
        max_tensor_bytes: on a TPU, of a tensor that rows lie in; larger stacks are cut.
    """

    def __init__(
        self,
        tables: Sequence[ShardedTable],
        stacks: Sequence[Stack],
        num_collections: int,
        wire: Wire,
        device: torch.device,
        wire_dtype: torch.dtype,
        max_tensor_bytes: int = MAX_TENSOR_BYTES,
    ) -> None:
        self.tables, self.stacks, self.wire, self.device = tuple(tables), tuple(stacks), wire, device
        self.storages = [StackStorage(stack, device, max_tensor_bytes) for stack in stacks]
        doubled = any(storage.compute_dtype == torch.float64 for storage in self.storages)
        self.compute_dtype = torch.float64 if doubled else torch.float32
        self.wire_dtype = self.compute_dtype if wire_dtype == torch.float32 else wire_dtype
        self.learning_rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in range(num_collections)]
        self._answers = [Answers(stack, wire.num_ranks, device) for stack in stacks]
        self._arrangement = Arrangement(stacks, num_collections)
        dims = {stack.collection: tables[stack.places[0].table].config.embedding_dim for stack in stacks}
        unpooled = sorted({stack.collection for stack in stacks if stack.unpooled})
        self.sequences = {number: SequenceArrangement(stacks, number, dims[number]) for number in unpooled}
        self.area_tables = sorted({place.table for stack in stacks if stack.squares for place in stack.places})
        self._squares = {
            number: ColumnSquares(stack, self.storages[number], tables, self.area_tables, wire.rank, wire.num_ranks)
            for number, stack in enumerate(stacks)
            if stack.squares
        }
        self.hook = torch.zeros((), requires_grad=True)
        self._unreduced = False

    def lookup(self, features: RoutedFeatures) -> tuple[Tensor, ...]:
        """Look up a batch; its backward pass updates the tables, but for replicated ones.

        Args:
            features: of `BatchRouter.prepare`.

        Returns:
            For each collection its output, `[batch_size, columns]`; of sequences `[places of all features, dim]`.

        Raises:
            TpurecError: the gradients of replicated tables of the step before were not reduced.
        """
        if self._unreduced and torch.is_grad_enabled():
            raise TpurecError(
                "the gradients of data-parallel tables were not added up after the last backward pass.",
                "Call reduce() of tpurec.sharding.dense_parallel.DenseGradientReducer once a step.",
            )
        return _Exchanged.apply(self.hook, self, features)

    def forward(self, features: RoutedFeatures) -> tuple[list[Tensor], list[_Request]]:
        """The forward pass, without autograd.

        Args:
            features: of `BatchRouter.prepare`.

        Returns:
            For each collection its output, as of `lookup`; and what was asked of each stack here.
        """
        received, ranks = features.received(), self.wire.num_ranks
        requests, remote, replicated, at = [], [], [], 0
        for stack, storage, route in zip(self.stacks, self.storages, features.routes, strict=True):
            request = self._request(stack, route, received.narrow(1, at, route.message_size), features.padded_size)
            at += route.message_size
            lines = embedding_bag(
                storage.parts,
                request.rows,
                request.offsets,
                request.weights,
                "sum",
                1,
                stack.num_rows,
                stack.width,
            )
            num_rows = ranks * route.sizes.rows
            num_lines = request.num_lines - route.sizes.replicated
            remote.append(lines[:num_rows].view(ranks, -1))
            remote.append(lines[num_rows:num_lines].view(ranks, -1))
            replicated.append(lines[num_lines:])
            requests.append(request)
        vectors, _ = self.wire.all_to_all("vectors", joined(remote, 1, self.wire_dtype), reuse=True)
        sources, at = [], 0
        for number, (stack, storage, route) in enumerate(zip(self.stacks, self.storages, features.routes, strict=True)):
            num_rows, num_bags = route.sizes.rows * stack.width, stack.num_answers * features.padded_size * stack.width
            rows = vectors.narrow(1, at, num_rows).to(storage.compute_dtype)
            bags = vectors.narrow(1, at + num_rows, num_bags).to(storage.compute_dtype)
            at += num_rows + num_bags
            pooled = self._answers[number].gather(bags, features.padded_size) if stack.bag_slots else None
            sources.append(_scaled(pooled, route.bag_scales))
            own = self._pool(stack, route, rows, replicated[number]) if stack.local_slots else None
            sources.append(_scaled(own, route.local_scales))
        outputs = self._arrangement.outputs(sources, features.batch_size)
        sizes = [route.sizes for route in features.routes]
        for collection, arrangement in self.sequences.items():
            outputs[collection] = arrangement.output(sources[1::2], sizes)
        return outputs, requests

    def _request(self, stack: Stack, route: DeviceRoute, received: Tensor, batch_size: int) -> _Request:
        ranks, sizes = self.wire.num_ranks, route.sizes
        num_bags = stack.num_answers * batch_size
        wanted, lengths, ids = received.split_with_sizes(
            [sizes.rows, num_bags, route.message_size - sizes.rows - num_bags], dim=1
        )
        first = ranks * sizes.rows
        rows = [wanted.reshape(-1), ids[:, : sizes.bag_ids].reshape(-1), route.replicated]
        begins = lengths.cumsum(1, dtype=torch.int32) - lengths + route.constants.bag_starts[:, None]
        end = first + ranks * sizes.bag_ids
        # The last bag of a rank runs on over the padding, which is skipped: so one list of offsets has no gaps.
        offsets = torch.cat([route.constants.row_numbers, begins.reshape(-1), route.constants.replicated_numbers])
        weights = None
        if route.constants.ones is not None:
            bits = ids[:, sizes.bag_ids :].reshape(-1)
            weights = torch.cat([route.constants.ones[:first], bits.view(torch.float32), route.constants.ones[first:]])
        num_lines = first + ranks * num_bags + sizes.replicated
        return _Request(torch.cat(rows), offsets, weights, end, num_lines)

    def _pool(self, stack: Stack, route: DeviceRoute, rows: Tensor, replicated: Tensor) -> Tensor:
        if stack.unpooled:
            return sequence_vectors(rows.reshape(-1, stack.width), replicated, route.index)
        lines = joined([rows.reshape(-1, stack.width), replicated], 0, rows.dtype)
        slots = len(stack.local_slots)
        return pool_lines(lines, route.index, route.offsets, route.weights, slots).view(-1, slots, stack.width)

    def backward(self, features: RoutedFeatures, requests: list[_Request], grads: Sequence[Tensor | None]) -> None:
        """The backward pass: gradients to the owners, and their optimizer step.

        Args:
            features: of the forward pass.
            requests: of the forward pass.
            grads: for each collection the gradient of its output; None where nothing depends on it.
        """
        ranks = self.wire.num_ranks
        dtypes = [storage.compute_dtype for storage in self.storages]
        sources = self._arrangement.gradients(grads, features.padded_size, dtypes, self.device)
        sizes = [route.sizes for route in features.routes]
        for collection, arrangement in self.sequences.items():
            for number, grad in arrangement.gradients(grads[collection], sizes, dtypes, self.device).items():
                sources[2 * number + 1] = grad
        remote = []
        for number, (stack, route) in enumerate(zip(self.stacks, features.routes, strict=True)):
            storage, (bags, own) = self.storages[number], (sources[2 * number], sources[2 * number + 1])
            num_rows = ranks * route.sizes.rows
            if own is not None:
                own = _scaled(own, route.local_scales)
                lines = pool_lines(own.reshape(-1, stack.width), route.lines, route.line_offsets, route.line_weights, 1)
                remote.append(lines[:num_rows].view(ranks, -1))
                if stack.num_replicated and not stack.frozen:
                    storage.replicated_gradients.index_add_(0, route.replicated_targets, lines[num_rows:])
                    ones = lines.new_ones(lines.shape[0] - num_rows)
                    storage.replicated_uses.index_add_(0, route.replicated_targets, ones)
                    self._unreduced = True
            if bags is not None:
                spread = self._answers[number].spread(_scaled(bags, route.bag_scales))
                remote.append(spread.view(ranks, -1))
        received, _ = self.wire.all_to_all("gradients", joined(remote, 1, self.wire_dtype), reuse=True)
        self._update(features, requests, received)

    def _update(self, features: RoutedFeatures, requests: list[_Request], received: Tensor) -> None:
        squares = received.new_zeros(features.squares_size + 1, num_sums(self.stacks), dtype=self.compute_dtype)
        waiting, at = {}, 0
        for number, (stack, storage, route) in enumerate(zip(self.stacks, self.storages, features.routes, strict=True)):
            num_rows, num_bags = route.sizes.rows * stack.width, stack.num_answers * features.padded_size * stack.width
            parts = [received.narrow(1, at, num_rows), received.narrow(1, at + num_rows, num_bags)]
            at += num_rows + num_bags
            if stack.frozen or stack.collection not in features.collections:
                continue
            if not num_rows + num_bags:
                # No rank has had an id yet: no row moves, but the update counts, as it does for an unsharded table.
                if stack.optimizer.counts_steps:
                    storage.state[-1].add_(1)
                continue
            grad = joined([part.reshape(-1, stack.width) for part in parts], 0, storage.compute_dtype)
            request = requests[number]
            rows, offsets = request.rows[: request.num_ids], request.offsets[: grad.shape[0] + 1]
            weights = None if request.weights is None else request.weights[: request.num_ids]
            if number in self._squares:
                found = self._squares[number].combine(rows, offsets, weights, grad, features.areas, squares)
                waiting[number] = found
            else:
                self._step(number, storage.state, grad, rows, offsets, weights)
        if self._squares:
            self.wire.all_reduce("squares", squares)
            for number, found in waiting.items():
                lr = self.learning_rates[self.stacks[number].collection]
                self._squares[number].step(found, squares, lr)

    def _step(
        self,
        number: int,
        state: list[Tensor],
        grad: Tensor,
        rows: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> None:
        stack, storage, optimizer = self.stacks[number], self.storages[number], self.stacks[number].optimizer
        embedding_update_(
            storage.parts,
            state,
            grad,
            rows,
            offsets,
            weights,
            self.learning_rates[stack.collection],
            optimizer.kind,
            optimizer.eps,
            optimizer.weight_decay,
            "sum",
            [0],
            stack.num_rows,
            stack.width,
            **optimizer.arguments(),
        )

    def replicated_gradients(self) -> list[Tensor]:
        """What is to be added up over ranks before `step_replicated`: gradients of replicated rows, and their uses."""
        found = []
        for stack, storage in zip(self.stacks, self.storages, strict=True):
            if stack.num_replicated and not stack.frozen:
                found += [storage.replicated_gradients, storage.replicated_uses]
        return found

    def step_replicated(self) -> None:
        """Let the replicated rows take one step with `replicated_gradients`, which are then cleared."""
        for number, (stack, storage) in enumerate(zip(self.stacks, self.storages, strict=True)):
            if stack.num_replicated and not stack.frozen:
                count, gradients = stack.num_replicated, storage.replicated_gradients
                numbers = torch.arange(count + 1, dtype=torch.int32, device=self.device)
                # A row that no rank touched takes no step: weight decay and moments would move it.
                rows = torch.where(storage.replicated_uses[:count] > 0, numbers[:count], -1)
                self._step(number, storage.replicated_state, gradients[:count], rows, numbers, None)
                gradients.zero_()
                storage.replicated_uses.zero_()
        self._unreduced = False


class _Exchanged(torch.autograd.Function):
    """`hook` is any tensor that requires a gradient, so that backward runs; it gets none."""

    @staticmethod
    def forward(ctx, hook: Tensor, exchange: Exchange, features: RoutedFeatures) -> tuple[Tensor, ...]:
        outputs, requests = exchange.forward(features)
        ctx.exchange, ctx.features, ctx.requests = exchange, features, requests
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple:
        ctx.exchange.backward(ctx.features, ctx.requests, grads)
        return None, None, None


def pool_lines(lines: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None, num_slots: int) -> Tensor:
    """Add up lines by bag.

    Args:
        lines: `[num_lines, width]`.
        index: int32 `[num_ids]`.
        offsets: int32 `[num_slots * num_bags + 1]`; `index` behind the last is padding.
        weights: float32 `[num_ids]` or None.
        num_slots: slots that the bags belong to, slot after slot.

    Returns:
        `[num_bags, num_slots * width]`.
    """
    if lines.device.type == "cpu":
        num_lines, width = lines.shape
        return embedding_bag([lines], index, offsets, weights, "sum", num_slots, num_lines, width)
    # Static shapes without a packed copy of the lines: padding goes to a bag of its own, which is cut off.
    num_bags = offsets.shape[0] - 1
    positions = torch.arange(index.shape[0], dtype=offsets.dtype, device=lines.device)
    bags = torch.searchsorted(offsets, positions, right=True) - 1
    found = lines.index_select(0, index)
    if weights is not None:
        found = found * weights[:, None].to(found.dtype)
    pooled = lines.new_zeros(num_bags + 1, lines.shape[1]).index_add_(0, bags.clamp(max=num_bags), found)[:num_bags]
    return pooled.view(num_slots, -1, lines.shape[1]).transpose(0, 1).reshape(-1, num_slots * lines.shape[1])


def joined(parts: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
    """Join arrays; a single one that is not empty is not copied.

    Args:
        parts: at least one.
        dim: along which.
        dtype: of the result.

    Returns:
        A contiguous array.
    """
    filled = [part for part in parts if part.shape[dim]] or list(parts[:1])
    if len(filled) == 1:
        return filled[0].to(dtype).contiguous()
    return torch.cat([part.to(dtype) for part in filled], dim=dim)


def _scaled(pooled: Tensor | None, scales: Tensor | None) -> Tensor | None:
    return pooled if pooled is None or scales is None else pooled * scales.unsqueeze(-1)
