"""Tables that are not held while a model is built: their initial values can be drawn later, block by block.

Inside `deferred_tables` a fused collection is built on `meta`. It remembers the random state that it began with and
draws all values once, to throw them away, so that what is built after it is the same as ever; `initial_blocks` draws
them again. That is the price of never holding a table: each value is drawn twice, on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig

from tpurec.embeddings.stack import dtype_of

_BLOCK_VALUES = 1 << 22
_deferring: ContextVar[bool] = ContextVar("deferring", default=False)


@contextmanager
def deferred_tables(deferred: bool = True) -> Iterator[None]:
    """Build fused collections on `meta` inside of this; for `tpurec.sharding.modules.shard`.

    Args:
        deferred: False ends it for a part inside.

    Example:
        >>> with deferred_tables():
        ...     model = build_model(config, tables, schema, seed=0, optimizer=SGD(0.1))
        >>> model = shard(model, plan)
    """
    token = _deferring.set(deferred)
    try:
        yield
    finally:
        _deferring.reset(token)


def are_tables_deferred() -> bool:
    """Whether `deferred_tables` is in force.

    Returns:
        That.
    """
    return _deferring.get()


def initial_blocks(
    tables: Sequence[EmbeddingBagConfig], random_state: Tensor | None = None
) -> Iterator[tuple[EmbeddingBagConfig, int, Tensor]]:
    """Draw the initial values of tables, in the order in which a collection draws them.

    TorchRec's default `init_fn`, a uniform distribution, is drawn in blocks of rows, which gives the same values; a
    table with an `init_fn` of its own is drawn whole.

    Args:
        tables: in the order of the stacks.
        random_state: to begin with, after which the global state is as before; None to draw from the global state.

    Yields:
        The table, the first row of the block, and the block `[rows, embedding_dim]` on the CPU.
    """
    with torch.random.fork_rng(devices=[], enabled=random_state is not None), torch.no_grad():
        state = random_state
        for table in tables:
            block = table.num_embeddings
            if _is_uniform(table):
                block = max(1, _BLOCK_VALUES // table.embedding_dim)
            for start in range(0, table.num_embeddings, block):
                rows = min(block, table.num_embeddings - start)
                values = torch.empty(rows, table.embedding_dim, dtype=dtype_of(table))
                if state is not None:  # the caller may draw between two blocks
                    torch.set_rng_state(state)
                table.init_fn(values)
                state = None if random_state is None else torch.get_rng_state()
                yield table, start, values


def _is_uniform(table: EmbeddingBagConfig) -> bool:
    made = table.init_fn
    return isinstance(made, functools.partial) and made.func is torch.nn.init.uniform_
