"""What the sharded exchange carries from 8 to 4,096 ranks, and what a step would take by the planner's model.

python -m benchmarks.scale [--json] [--plot FILE.png] [--tables FILE] [--batch-size N] [--data PARQUET] [--max-ranks N]

Every rank's batch goes through the router that training uses, in one process: the sizes it agrees on are the bytes that
the collectives carry. Ids are drawn by each table's Zipf law, or taken from training data. Seconds are a model (the
planner's for the parts on the chip, its collectives' for the bytes counted here), not run on hardware.

To show that the counts are right, 2, 4 and 8 processes really train a step (gloo) on smaller copies of the tables, and
what their collectives carried is compared with what was counted for them: `source` is "measured" for the one, "model"
for the other. The command fails if they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tpurec.sharding.plan import Plan
    from tpurec.sharding.routing import HostBatch
    from tpurec.sharding.tables import TableSpec

MLPERF = Path(__file__).resolve().parents[1] / "examples" / "mlperf_dlrm_v2" / "tables.toml"
MEASURED_RANKS = (2, 4, 8)
# v5p is the one generation whose slices reach 4,096 chips; its names count TensorCores, two on a chip.
MODELLED_RANKS = tuple(8 << power for power in range(10))
LEARNING_RATE = 0.1


def main() -> None:
    """Parse the options, count, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list")
    parser.add_argument("--plot", metavar="FILE", help="draw bytes, padding and seconds by ranks (needs matplotlib)")
    parser.add_argument("--tables", default=str(MLPERF), help="table list, as for `tpurec plan`")
    parser.add_argument("--batch-size", type=int, default=65_536, help="global examples per step")
    parser.add_argument("--data", help="training Parquet whose ids are used, too")
    parser.add_argument("--dim", type=int, default=64, help="columns of the tables of --data")
    parser.add_argument("--max-ranks", type=int, default=MODELLED_RANKS[-1], help="largest slice")
    parser.add_argument("--measured-rows", type=int, default=20_000, help="most rows of a table in the real runs")
    parser.add_argument("--measured-batch-size", type=int, default=512, help="global examples of the real runs")
    options = parser.parse_args()
    from rich.console import Console

    from tpurec.reporting import Reporter

    report = Reporter(options.json)
    results: list[dict[str, Any]] = []
    for stream in _streams(options):
        small = stream.capped(options.measured_rows)
        for num_ranks in MEASURED_RANKS:
            results += _validated(small, num_ranks, options.measured_batch_size)
            report.log(f"{stream.name}: {num_ranks} processes carried what was counted for them")
        for num_ranks in MODELLED_RANKS:
            if num_ranks <= options.max_ranks:
                results.append(_modelled(stream, num_ranks, options.batch_size))
                report.log(f"{stream.name}: {num_ranks} ranks counted")
    if options.plot:
        draw(results, options.plot)
        report.log(f"plot: {options.plot}")
    if options.json:
        print(json.dumps(results))
    else:
        _print(Console(width=None if sys.stdout.isatty() else 120), results)


class Stream:
    """Tables, and ids for them.

    Args:
        name: for people.
        tables: the tables.
        columns: training data to take the ids from; None to draw them.
    """

    def __init__(self, name: str, tables: tuple[TableSpec, ...], assumptions: Any, columns: Any = None) -> None:
        self.name, self.tables, self.assumptions, self._columns = name, tables, assumptions, columns

    def capped(self, num_rows: int) -> Stream:
        """The same with smaller tables, for real runs.

        Args:
            num_rows: most rows of a table; ids of training data are taken modulo.

        Returns:
            The stream.
        """
        import dataclasses

        tables = tuple(
            dataclasses.replace(table, num_embeddings=min(num_rows, table.num_embeddings)) for table in self.tables
        )
        return Stream(self.name, tables, self.assumptions, self._columns)

    def batch(self, first: int, num_examples: int) -> HostBatch:
        """Some examples of the global batch, always the same.

        Args:
            first: number of the first.
            num_examples: how many.

        Returns:
            Their ids.
        """
        from tpurec.sharding.drawn_ids import draw_batch
        from tpurec.sharding.routing import HostBatch

        if self._columns is None:
            return draw_batch(self.tables, self.assumptions, first, num_examples)
        values, lengths = {}, {}
        examples = np.arange(first, first + num_examples) % self._columns.num_rows
        for table in self.tables:
            for feature in table.features:
                column = self._columns.sparse[feature.name].take(examples)
                values[feature.name] = (column.rows % table.num_embeddings).astype(np.int32)
                lengths[feature.name] = column.lengths.astype(np.int32)
        return HostBatch(num_examples, values, lengths, None)

    def shares(self, num_ranks: int, batch_size: int) -> Iterator[HostBatch]:
        """Every rank's share of a global batch.

        Args:
            num_ranks: ranks.
            batch_size: global examples; the ranks share them evenly.

        Yields:
            The batches, rank after rank.
        """
        share = batch_size // num_ranks
        for rank in range(num_ranks):
            yield self.batch(rank * share, share)


def _streams(options: argparse.Namespace) -> list[Stream]:
    from tpurec.sharding.sources import read_source

    drawn = read_source(options.tables)
    unpooled = [table.name for table in drawn.tables if table.pooling == "none"]
    if unpooled:
        raise SystemExit(f"{options.tables}: table {unpooled[0]!r} has pooling 'none'; only bags are trained here.")
    streams = [Stream("generated", drawn.tables, drawn.assumptions)]
    if options.data:
        from tpurec.features.schema import Schema
        from tpurec.sharding.measure import sample

        measured = read_source(options.data, embedding_dim=options.dim)
        columns = sample(Schema.from_parquet(options.data), Path(options.data), options.batch_size)
        streams.append(Stream("training data", measured.tables, measured.assumptions, columns))
    return streams


def _configs(tables: tuple[TableSpec, ...]) -> list[Any]:
    from torchrec import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[feature.name for feature in table.features],
        )
        for table in tables
    ]


def _plan(stream: Stream, slice_: str, batch_size: int) -> Plan:
    from tpurec.sharding.planner import plan

    found = plan(stream.tables, slice_, batch_size, stream.assumptions)
    if not found.fits:
        raise SystemExit(f"the tables do not fit on {slice_}: {found.problems[0].message}")
    return found


def _modelled(stream: Stream, num_ranks: int, batch_size: int) -> dict[str, Any]:
    from tpurec.embeddings import RowWiseAdagrad
    from tpurec.sharding.exchange_volume import ExchangeVolume

    plan = _plan(stream, f"v5p-{2 * num_ranks}", batch_size)
    optimizer = RowWiseAdagrad(lr=LEARNING_RATE)
    dense = int(plan.assumptions.dense_parameters)
    volume = ExchangeVolume(_configs(stream.tables), optimizer, plan, dense_elements=dense)
    step = volume.step(stream.shares(num_ranks, batch_size))
    return {**_row(stream, plan, step, "model"), "step_seconds": _step_seconds(plan, step.bytes)}


def _step_seconds(plan: Plan, bytes_by_kind: dict[str, float]) -> float:
    """The planner's seconds on the chip, and the collectives' for the bytes that were counted."""
    from tpurec.topology import collectives

    slice_, num_ranks = plan.topology, plan.topology.num_ranks
    links = plan.assumptions.links()
    all_to_all, all_reduce = collectives.all_to_all(slice_, links), collectives.all_reduce(slice_, links)
    on_chip = sum(plan.estimates.step_parts.get(part, 0.0) for part in ("rows", "pool", "dense"))
    whole = num_ranks / (num_ranks - 1)  # the formulas count a rank's own share, too
    wire = sum(all_to_all.seconds(bytes_by_kind[kind] * whole) for kind in ("ids", "vectors", "gradients"))
    for kind in ("squares", "dense_gradients"):
        if kind in bytes_by_kind:
            wire += all_reduce.seconds(bytes_by_kind[kind] * whole / 2)  # counted in its ring form
    return on_chip + wire


def _row(stream: Stream, plan: Plan, step: Any, source: str) -> dict[str, Any]:
    return {
        "ids": stream.name,
        "num_ranks": plan.topology.num_ranks,
        "slice": plan.slice,
        "batch_size": plan.batch_size,
        "exchange_bytes": step.exchange_bytes,
        "bytes": step.bytes,
        "padding_share": step.padding_share,
        "unique_share": step.unique_share,
        "step_seconds": None,
        "planned_step_seconds": plan.estimates.step_seconds,
        "source": source,
    }


def _validated(stream: Stream, num_ranks: int, batch_size: int) -> list[dict[str, Any]]:
    import torch.multiprocessing as multiprocessing

    from tpurec.embeddings import RowWiseAdagrad
    from tpurec.sharding.exchange_volume import ExchangeVolume

    plan = _plan(stream, f"cpu-{num_ranks}", batch_size)
    volume = ExchangeVolume(_configs(stream.tables), RowWiseAdagrad(lr=LEARNING_RATE), plan)
    counted = volume.step(stream.shares(num_ranks, batch_size))
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (stream, plan, batch_size, str(Path(folder) / "store"), answers)
        multiprocessing.spawn(_train_a_step, arguments, nprocs=num_ranks)
    measured, padding, unique, seconds = answers.get()
    if measured != counted.bytes:
        raise SystemExit(f"{stream.name}, {num_ranks} ranks: {counted.bytes} bytes counted, {measured} carried.")
    model = _row(stream, plan, counted, "model")
    model["step_seconds"] = plan.estimates.step_seconds
    real = {
        **model,
        "bytes": measured,
        "exchange_bytes": sum(measured.values()),
        "padding_share": padding,
        "unique_share": unique,
        "step_seconds": seconds,
        "source": "measured",
    }
    return [model, real]


def _train_a_step(rank: int, stream: Stream, plan: Plan, batch_size: int, store: str, answers: Any) -> None:
    import logging
    import time

    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # a note on tracing, from every process
    import torch
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    from tpurec.embeddings import FusedEmbeddingBagCollection, RowWiseAdagrad, deferred_tables
    from tpurec.sharding.batch_router import BatchRouter
    from tpurec.sharding.dense_parallel import dense_gradient_reducer
    from tpurec.sharding.modules import exchange_stats, shard

    torch.set_num_threads(1)
    num_ranks = plan.topology.num_ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    with deferred_tables():
        fused = FusedEmbeddingBagCollection(_configs(stream.tables), RowWiseAdagrad(lr=LEARNING_RATE))
    model = shard(fused, plan)
    router, reducer = BatchRouter(model), dense_gradient_reducer(model)
    share = batch_size // num_ranks
    batch = stream.batch(rank * share, share)
    names = list(batch.values)
    features = KeyedJaggedTensor(
        names,
        torch.from_numpy(np.concatenate([batch.values[name] for name in names])),
        lengths=torch.from_numpy(np.concatenate([batch.lengths[name] for name in names])),
    )
    started = time.perf_counter()
    routed = router.prepare(features)
    model(routed.features).values().sum().backward()
    reducer.reduce()
    seconds = time.perf_counter() - started
    stats = router.stats
    shares = torch.tensor(
        [stats.padding_elements, stats.message_elements + stats.vector_elements, stats.unique_rows, stats.ids],
        dtype=torch.int64,
    )
    dist.all_reduce(shares)
    if rank == 0:
        padding, elements, unique, ids = shares.tolist()
        by_kind = exchange_stats(model)["bytes_per_step"]
        answers.put((by_kind, padding / max(1, elements), unique / ids if ids else 1.0, seconds))
    dist.destroy_process_group()


def _print(console: Any, results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="The exchange of one step, per rank")
    for column in ("ids", "source", "slice", "ranks", "batch", "MB out", "padding", "unique", "step", "planned"):
        table.add_column(column, justify="right")
    for row in results:
        seconds = f"{row['step_seconds'] * 1e3:,.2f} ms" if row["source"] == "model" else "-"
        table.add_row(
            row["ids"],
            row["source"],
            row["slice"],
            f"{row['num_ranks']:,}",
            f"{row['batch_size']:,}",
            f"{row['exchange_bytes'] / 1e6:,.3f}",
            f"{row['padding_share']:.1%}",
            f"{row['unique_share']:.1%}",
            seconds,
            f"{row['planned_step_seconds'] * 1e3:,.2f} ms",
        )
    console.print(table)
    console.print("Step: the plan's time on the chip, and the wire's for the bytes counted. Planned: the plan's own")
    console.print("estimate. Both are models; not run on hardware.")


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Draw bytes, padding and seconds by ranks.

    Args:
        results: rows, as printed.
        path: image file.
    """
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'tpurec[plot]'")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels = [
        ("exchange_bytes", 1e6, "MB that leave a rank in a step", "log"),
        ("padding_share", 0.01, "% of ids and vectors that is padding", "linear"),
        ("step_seconds", 1e-3, "modelled ms of a step (not run on hardware)", "log"),
    ]
    big = [row for row in results if not row["slice"].startswith("cpu")]
    for axis, (key, unit, label, scale) in zip(axes, panels, strict=True):
        for name in dict.fromkeys(row["ids"] for row in big):
            rows = [row for row in big if row["ids"] == name]
            axis.plot([row["num_ranks"] for row in rows], [row[key] / unit for row in rows], marker="o", label=name)
        axis.set(xscale="log", yscale=scale, xlabel="ranks (v5p)", title=label)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(title="ids")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
