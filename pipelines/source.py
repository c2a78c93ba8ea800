"""Where the batches of a run come from. Engines differ only in who reads a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipelines.order import Manifest, Order, Pass, natural_pass
from pipelines.reading import Reader, SourceBatch, find_files, scan
from pipelines.recipe import Recipe
from pipelines.shares import WHOLE, Share
from pipelines.train_loop import total_steps
from tpurec.errors import DataError
from tpurec.features import Ladder, Schema
from tpurec.features.transform import Transformer

Part = Literal["train", "test"]


@dataclass(frozen=True)
class RunData:
    """The data of a run, found and checked.

    Args:
        schema: with the recipe's id policy.
        train: the training data.
        test: the test data, if there is any.
    """

    schema: Schema
    train: Manifest
    test: Manifest | None

    def warnings(self) -> list[str]:
        """Say what makes the test metrics worth little.

        Returns:
            A line if test files are training files too, in place or as a copy; else nothing.
        """
        trained_on = {file.footer_sha256 for file in self.train.files}
        shared = [file.path for file in (self.test.files if self.test else ()) if file.footer_sha256 in trained_on]
        if not shared:
            return []
        return [f"{shared[0]} ({len(shared)} in all) is training data and test data: the metrics flatter the model."]


class Source(ABC):
    """The training, validation and test batches of a run.

    Args:
        recipe: the resolved recipe.
        data: schema and manifests, checked.
        share: of every batch; by default all of it.

    Raises:
        DataError: too few training rows.
    """

    def __init__(self, recipe: Recipe, data: RunData, share: Share = WHOLE) -> None:
        self.recipe = recipe
        self.data = data
        self.share = share
        config = recipe.train
        try:
            self.order = Order(
                data.train, config.batch_size, config.seed, recipe.data.shuffle_window, recipe.data.validation_share
            )
        except ValueError as error:
            raise DataError(f"data.train: {error}.", "Give more rows, or set data.validation_share = 0.") from None
        self.batches_per_epoch = self.order.epoch(0).num_batches
        self.validation_rows = self.order.validation(config.eval_batch_size).num_rows
        self.train_rows = data.train.num_rows - self.validation_rows
        self.test_rows = None if data.test is None else data.test.num_rows
        self.total_steps = total_steps(config, self.batches_per_epoch)

    @property
    def total_rows(self) -> int:
        """Rows that a whole run trains on, without early stopping."""
        whole, rest = divmod(self.total_steps, self.batches_per_epoch)
        return whole * self.train_rows + rest * self.recipe.train.batch_size

    def train(self, epoch: int, batch: int) -> Iterator[SourceBatch]:
        """Give the training batches from a position on, over all epochs that remain.

        Args:
            epoch: of the first batch.
            batch: number in its epoch of the first batch.

        Yields:
            Global batches of `train.batch_size` rows, or this rank's shares of them; the last of an epoch may be
            padded.
        """
        passes = (self.order.epoch(number) for number in range(epoch, self.recipe.train.epochs))
        yield from self.read("train", passes, self._ladder(self.recipe.train.batch_size), batch)

    def validation(self) -> Iterator[SourceBatch]:
        """Give the validation rows, each once.

        Yields:
            Batches of `train.eval_batch_size` rows, or this rank's shares of them; the last padded.
        """
        size = self.recipe.train.eval_batch_size
        yield from self.read("train", [self.order.validation(size)], self._ladder(size), 0)

    def test(self) -> Iterator[SourceBatch]:
        """Give the test rows, each once, in their order.

        Yields:
            Batches of `train.eval_batch_size` rows, or this rank's shares of them; the last padded.
        """
        size = self.recipe.train.eval_batch_size
        yield from self.read("test", [natural_pass(self._manifest("test"), size)], self._ladder(size), 0)

    @abstractmethod
    def read(self, part: Part, passes: Iterable[Pass], ladder: Ladder, first_batch: int) -> Iterator[SourceBatch]:
        """Read passes one after the other.

        Args:
            part: which data the passes are over.
            passes: say which rows make up which batch.
            ladder: for the id capacities.
            first_batch: number of the first batch wanted of the first pass.

        Yields:
            The batches from there on, in order.
        """

    def reader(self, part: Part) -> Reader:
        """Make a reader.

        Args:
            part: of which data.

        Returns:
            The reader.
        """
        return Reader(self._manifest(part), self.data.schema)

    def _manifest(self, part: Part) -> Manifest:
        manifest = self.data.train if part == "train" else self.data.test
        if manifest is None:
            raise ValueError("the recipe names no test data")
        return manifest

    def _ladder(self, batch_size: int) -> Ladder:
        return Ladder.for_batch(self.share.size(batch_size))


def find_data(recipe: Recipe) -> RunData:
    """Find a recipe's data and check every file's columns; no row is read.

    Args:
        recipe: the resolved recipe.

    Returns:
        Schema and manifests.

    Raises:
        DataError: no data, or a file that does not fit the schema; names file and column.
        ConfigError: a schema or id policy that cannot be.
    """
    data = recipe.data
    files = find_files(data.train, "data.train")
    schema = Schema.load(data.schema) if data.schema else Schema.from_parquet(files[0][0])
    schema = schema.with_id_policy(data.id_policy)
    transformer = Transformer(schema)
    train = scan(files, transformer)
    test = None if data.test is None else scan(find_files(data.test, "data.test"), transformer)
    for key, manifest in (("train", train), ("test", test)):
        if manifest is not None and manifest.num_rows == 0:
            raise DataError(f"data.{key}: {len(manifest.files)} files without a row.", "Give data with rows.")
    return RunData(schema, train, test)
