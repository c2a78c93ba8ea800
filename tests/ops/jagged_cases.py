"""Jagged inputs for the ops, one per way in which such stacks break; the emulated tier uses the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

NUM_ROWS = 57
NUM_FEATURES = 2
BATCH_SIZE = 7
CAPACITY = 96


@dataclass(frozen=True)
class Case:
    """One batch for a stack of two tables (rows 0 to 29 and 30 to 56) of which each is read by one feature.

    Args:
        ids: `[capacity]`.
        offsets: `[num_bags + 1]`.
        batch_size: examples.
    """

    ids: np.ndarray
    offsets: np.ndarray
    batch_size: int = BATCH_SIZE

    def weights(self, pooling: str = "sum") -> np.ndarray:
        """Weights, some of them 0: of both signs for sums; for means >= 0, as a sum that cancels has no exact digits.

        Args:
            pooling: `sum` or `mean`.

        Returns:
            float32 `[capacity]`.
        """
        weights = np.random.default_rng(0).normal(size=len(self.ids)).astype(np.float32)
        weights = np.abs(weights) if pooling == "mean" else weights
        weights[::7] = 0
        return weights


def _offsets(lengths: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _ids_of(lengths: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    half = len(lengths) // 2
    first, second = int(lengths[:half].sum()), int(lengths[half:].sum())
    return np.concatenate([generator.integers(0, 30, first), generator.integers(30, NUM_ROWS, second)]).astype(np.int32)


def _filled(ids: np.ndarray, offsets: np.ndarray, filler: int = -1) -> Case:
    padded = np.full(CAPACITY, filler, np.int32)
    padded[: len(ids)] = ids
    return Case(padded, offsets)


def make(kind: str) -> Case:
    """Make a case by name.

    Args:
        kind: a name of `KINDS`.

    Returns:
        The case; the same every time.
    """
    generator = np.random.default_rng(KINDS.index(kind))
    num_bags = NUM_FEATURES * BATCH_SIZE
    lengths = generator.integers(0, 6, num_bags)
    if kind == "mixed":
        return _filled(_ids_of(lengths, generator), _offsets(lengths))
    if kind == "no_examples":
        return Case(np.zeros(0, np.int32), np.zeros(1, np.int32), batch_size=0)
    if kind == "empty_bags":
        return Case(np.full(CAPACITY, -1, np.int32), np.zeros(num_bags + 1, np.int32))
    if kind == "outside_of_table":
        ids = _ids_of(lengths, generator)
        ids[::3] = NUM_ROWS
        ids[1::5] = np.iinfo(np.int32).max
        ids[2::5] = np.iinfo(np.int32).min
        return _filled(ids, _offsets(lengths))
    if kind == "skipped_inside":
        ids = _ids_of(lengths, generator)
        ids[::2] = -1
        return _filled(ids, _offsets(lengths))
    if kind == "all_skipped":
        return Case(np.full(CAPACITY, -1, np.int32), _offsets(lengths))
    if kind == "trailing_values":
        ids = _ids_of(lengths, generator)
        return _filled(ids, _offsets(lengths), filler=3)
    if kind == "repeated_in_bag":
        lengths = np.full(num_bags, 3)
        ids = np.repeat(_ids_of(np.ones(num_bags, int), generator), 3)
        return _filled(ids, _offsets(lengths))
    if kind == "hot_row":
        lengths = np.full(num_bags, 5)
        half = num_bags // 2 * 5
        return _filled(np.repeat([7, 40], half).astype(np.int32), _offsets(lengths))
    if kind == "distinct":
        order = np.concatenate([generator.permutation(30), 30 + generator.permutation(27)]).astype(np.int32)
        lengths = np.array([5, 3, 6, 4, 5, 5, 2, 4, 4, 3, 5, 4, 4, 3])
        return _filled(order, _offsets(lengths))
    if kind == "one_long_bag":
        lengths = np.zeros(num_bags, int)
        lengths[3], lengths[9] = 41, 37
        return _filled(_ids_of(lengths, generator), _offsets(lengths))
    raise ValueError(kind)


KINDS = (
    "mixed",
    "no_examples",
    "empty_bags",
    "outside_of_table",
    "skipped_inside",
    "all_skipped",
    "trailing_values",
    "repeated_in_bag",
    "hot_row",
    "distinct",
    "one_long_bag",
)
DIMS = (8, 16, 24, 32, 64, 128, 256, 288, 1024, 1280)
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def table(dim: int, num_rows: int = NUM_ROWS) -> np.ndarray:
    """Rows of a stack.

    Args:
        dim: columns.
        num_rows: rows.

    Returns:
        float32 `[num_rows, dim]`.
    """
    return np.random.default_rng(dim).normal(size=(num_rows, dim)).astype(np.float32)


def state(optimizer: str, dim: int, value: float = 0.0, num_rows: int = NUM_ROWS) -> np.ndarray | None:
    """Accumulators of a stack.

    Args:
        optimizer: decides the shape.
        dim: columns.
        value: of all accumulators.
        num_rows: rows.

    Returns:
        float32 `[num_rows, dim]` or `[num_rows]`, or None.
    """
    shape = {"sgd": None, "adagrad": (num_rows, dim), "rowwise_adagrad": (num_rows,)}[optimizer]
    return None if shape is None else np.full(shape, value, np.float32)


def gradient(batch_size: int, dim: int, seed: int = 1) -> np.ndarray:
    """A gradient of the output.

    Args:
        batch_size: examples.
        dim: columns of the tables.
        seed: of the generator.

    Returns:
        float32 `[batch_size, NUM_FEATURES * dim]`.
    """
    return np.random.default_rng(seed).normal(size=(batch_size, NUM_FEATURES * dim)).astype(np.float32)


def to_bags(values: np.ndarray, num_features: int = NUM_FEATURES) -> np.ndarray:
    """From the ops' layout to the kernels'.

    Args:
        values: `[batch_size, num_features * dim]`.
        num_features: features.

    Returns:
        `[num_features * batch_size, dim]`.
    """
    batch_size, columns = values.shape
    dim = columns // num_features
    return values.reshape(batch_size, num_features, dim).swapaxes(0, 1).reshape(batch_size * num_features, dim)


def tensor(array: np.ndarray | None) -> torch.Tensor | None:
    """A torch copy.

    Args:
        array: any array, or None.

    Returns:
        The tensor, or None.
    """
    return None if array is None else torch.from_numpy(array.copy())
