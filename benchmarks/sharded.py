"""Sharded training beside TorchRec's DistributedModelParallel (FBGEMM kernels, gloo), in one run.

python -m benchmarks.sharded [--json] [--batch-size 4096] [--features 26] [--rows 100000] [--dim 64] [--ids 1]

Both train the same DLRM on the same batches with the tables in the same places, in turn, step by step, so that the
machine's mood is the same for both. Ids follow a Zipf law, rows shuffled. The bytes are those of ids, lengths, vectors
and gradients of tables that left a rank, counted at the calls of the collectives; the dense part's all-reduce is the
same for both and not counted. Ours are routed in a thread, one batch ahead, as `tpurec train` does. CPU time is that of
one rank's process, threads included: it depends less than the wall on what else the machine does.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from typing import Any

SHARDINGS = ("table_wise", "row_wise")


def main() -> None:
    """Run the benchmark."""
    import torch.multiprocessing as multiprocessing
    from rich.table import Table

    from tpurec.reporting import Reporter

    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    numbers = {"batch-size": 4096, "features": 26, "rows": 100_000, "dim": 64, "ids": 1, "workers": 2, "steps": 16}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the ids' frequencies")
    parser.add_argument("--optimizer", choices=("sgd", "rowwise_adagrad"), default="rowwise_adagrad")
    parser.add_argument("--sharding", choices=SHARDINGS, action="append", help="only this one")
    options = parser.parse_args()
    report = Reporter(options.json)
    results = []
    for sharding in options.sharding or SHARDINGS:
        report.log(f"{sharding}: {options.steps} steps of both")
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        port = _free_port()
        arguments = (options, sharding, port, answers)
        multiprocessing.spawn(_rank, arguments, nprocs=options.workers)
        results.append(answers.get())

    def draw(console: Any) -> None:
        table = Table(title=f"Sharded DLRM on {options.workers} CPU processes, rows/s (median) and MB a step and rank")
        columns = ("sharding", "tpurec", "TorchRec", "speed", "CPU time", "tpurec MB", "TorchRec MB", "bytes")
        for column in columns:
            table.add_column(column, justify="right")
        for found in results:
            table.add_row(
                found["sharding"],
                f"{found['tpurec_rows_per_second']:,.0f}",
                f"{found['torchrec_rows_per_second']:,.0f}",
                f"{found['speed_ratio']:.2f}x",
                f"{found['cpu_ratio']:.2f}x less",
                f"{found['tpurec_bytes_per_step'] / 1e6:.3f}",
                f"{found['torchrec_bytes_per_step'] / 1e6:.3f}",
                f"{found['bytes_ratio']:.2f}x less",
            )
        console.print(table)

    values = {key: value for key, value in vars(options).items() if key not in ("json", "sharding")}
    report.result({**values, "results": results}, draw)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, options: argparse.Namespace, sharding: str, port: int, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.workers)
    found = measure(rank, options, sharding)
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def measure(rank: int, options: argparse.Namespace, sharding: str) -> dict[str, Any]:
    """Train both in turn on one rank.

    Args:
        rank: this rank.
        options: sizes, as parsed.
        sharding: `table_wise` or `row_wise`.

    Returns:
        Rows per second over all ranks, bytes that left this rank in a step, ratios, and how far the losses are apart.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.sharded_torchrec import counted

    ours, theirs = _Ours(options, sharding), _Theirs(options, sharding)
    batches = [_batch(options, rank, step) for step in range(options.steps)]
    seconds: dict[str, list[float]] = {"tpurec": [], "torchrec": []}
    cpu_seconds: dict[str, list[float]] = {"tpurec": [], "torchrec": []}
    gaps, sent_bytes = [], []
    ours.prepare(batches[0])
    for step, batch in enumerate(batches):
        following = batches[step + 1] if step + 1 < len(batches) else None
        losses = {}
        for name in ("tpurec", "torchrec") if step % 2 else ("torchrec", "tpurec"):
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            if name == "tpurec":
                losses[name] = ours.step(following)
            else:
                with counted() as sent:
                    losses[name] = theirs.step(batch)
                sent_bytes.append(sent.bytes)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
            cpu_seconds[name].append(time.process_time() - cpu_started)
        gaps.append(abs(losses["tpurec"] - losses["torchrec"]))
    steady = {name: statistics.median(values[3:] or values) for name, values in seconds.items()}
    busy = {name: statistics.median(values[3:] or values) for name, values in cpu_seconds.items()}
    mine, other = ours.bytes_per_step(), statistics.mean(sent_bytes)
    return {
        "sharding": sharding,
        "tpurec_rows_per_second": options.batch_size / steady["tpurec"],
        "torchrec_rows_per_second": options.batch_size / steady["torchrec"],
        "speed_ratio": steady["torchrec"] / steady["tpurec"],
        "tpurec_cpu_seconds_per_step": busy["tpurec"],
        "torchrec_cpu_seconds_per_step": busy["torchrec"],
        "cpu_ratio": busy["torchrec"] / busy["tpurec"],
        "tpurec_bytes_per_step": mine,
        "torchrec_bytes_per_step": other,
        "bytes_ratio": other / mine,
        "tpurec_stats": ours.stats(),
        "largest_loss_difference": max(gaps),
        "threads_per_rank": torch.get_num_threads(),
    }


def _configs(options: argparse.Namespace) -> list[Any]:
    from torchrec import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=options.rows, embedding_dim=options.dim, feature_names=[f"f{number}"]
        )
        for number in range(options.features)
    ]


def _dlrm(options: argparse.Namespace, collection: Any) -> Any:
    import torch
    from torchrec.models.dlrm import DLRM

    torch.manual_seed(1)
    return DLRM(collection, 13, [512, 256, options.dim], [512, 256, 1])


class _Ours:
    """This project's side."""

    def __init__(self, options: argparse.Namespace, sharding: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        import torch

        from tpurec.embeddings import SGD, FusedEmbeddingBagCollection, RowWiseAdagrad, dense_parameters
        from tpurec.sharding.batch_router import BatchRouter
        from tpurec.sharding.dense_parallel import dense_gradient_reducer
        from tpurec.sharding.modules import shard

        torch.manual_seed(0)
        optimizer = SGD(lr=0.01) if options.optimizer == "sgd" else RowWiseAdagrad(lr=0.01)
        model = _dlrm(options, FusedEmbeddingBagCollection(_configs(options), optimizer))
        self._model = shard(model, _plan(options, sharding))
        self._router, self._reducer = BatchRouter(self._model), dense_gradient_reducer(self._model)
        self._optimizer = torch.optim.SGD(dense_parameters(self._model), lr=0.01)
        self._pool = ThreadPoolExecutor(1)
        self._batch_size = options.batch_size
        self._routed: Any = None
        self._labels: Any = None

    def prepare(self, batch: Any) -> None:
        """Route a batch in the thread."""
        self._routed = self._pool.submit(self._router.prepare, batch)

    def step(self, following: Any) -> float:
        """Train on the batch that was prepared last, and prepare the next one meanwhile."""
        import torch.nn.functional as F

        routed = self._routed.result()
        if following is not None:
            self.prepare(following)
        logits = self._model(routed.dense, routed.features).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, routed.labels, reduction="sum") / routed.num_labelled_global
        self._optimizer.zero_grad()
        loss.backward()
        self._reducer.reduce()
        self._optimizer.step()
        return float(loss.detach()) * self._batch_size / len(routed.labels)

    def bytes_per_step(self) -> float:
        """Of tables, as counted at the collectives."""
        from tpurec.sharding.modules import exchange_stats

        by_kind = exchange_stats(self._model)["bytes_per_step"]
        return sum(size for kind, size in by_kind.items() if kind != "dense_gradients")

    def stats(self) -> dict[str, Any]:
        """Counts of the exchange."""
        from tpurec.sharding.modules import exchange_stats

        stats = self._router.stats
        more = {"padding_share": stats.padding_share, "unique_share": stats.unique_share, "programs": stats.programs}
        return {**exchange_stats(self._model), **more}


class _Theirs:
    """TorchRec's side."""

    def __init__(self, options: argparse.Namespace, sharding: str) -> None:
        import torch
        from torchrec import EmbeddingBagCollection

        from benchmarks.sharded_torchrec import distribute

        torch.manual_seed(0)
        model = _dlrm(options, EmbeddingBagCollection(_configs(options)))
        path = "sparse_arch.embedding_bag_collection"
        self._model = distribute(model, path, sharding, options.optimizer, 0.01)
        dense = [parameter for name, parameter in self._model.named_parameters() if path not in name]
        self._optimizer = torch.optim.SGD(dense, lr=0.01)

    def step(self, batch: Any) -> float:
        """Train on a batch."""
        import torch.nn.functional as F

        logits = self._model(batch.dense, batch.features).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def _plan(options: argparse.Namespace, sharding: str) -> Any:
    from tpurec.sharding.assumptions import Assumptions
    from tpurec.sharding.plan import PlacedTable, Plan, Rungs, Shard
    from tpurec.sharding.tables import FeatureSpec, TableSpec

    ranks, columns = tuple(range(options.workers)), (0, options.dim)
    placed = []
    for number in range(options.features):
        spec = TableSpec(f"t{number}", options.rows, options.dim, (FeatureSpec(f"f{number}", options.ids),))
        if sharding == "table_wise":
            placed.append(PlacedTable(spec, sharding, "bags", (Shard((number % options.workers,), "all", columns),)))
        else:
            shard = Shard(ranks, "modulo", columns, number % options.workers)
            placed.append(PlacedTable(spec, sharding, "unique_rows", (shard,)))
    return Plan(f"cpu-{options.workers}", options.batch_size, tuple(placed), (), Rungs(0, 0, 0, 0), Assumptions())


def _batch(options: argparse.Namespace, rank: int, step: int) -> Any:
    """One rank's share of a batch, the same for both sides: int32 ids, as our reader makes them."""
    import numpy as np
    import torch
    from torchrec import KeyedJaggedTensor

    from tpurec.embeddings import TorchBatch

    rng = np.random.default_rng((rank, step))
    examples = options.batch_size // options.workers
    weights = np.arange(1, options.rows + 1, dtype=np.float64) ** -options.zipf
    share = np.cumsum(weights / weights.sum())
    ranked = np.searchsorted(share, rng.random((options.features, examples * options.ids)))
    shuffled = np.random.default_rng(0).permutation(options.rows)
    ids = shuffled[np.minimum(ranked, options.rows - 1)].astype(np.int32)
    features = KeyedJaggedTensor(
        [f"f{number}" for number in range(options.features)],
        torch.from_numpy(ids.reshape(-1)),
        lengths=torch.full((options.features * examples,), options.ids, dtype=torch.int32),
    )
    dense = torch.from_numpy(rng.normal(size=(examples, 13)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 2, examples).astype(np.float32))
    return TorchBatch(dense, features, labels, torch.ones(examples, dtype=torch.bool))


if __name__ == "__main__":
    main()
