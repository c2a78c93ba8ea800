"""Fused embedding training on the CPU beside TorchRec's own fused collection (FBGEMM), in one run.

python -m benchmarks.fused [--json] [--batch-size 4096] [--features 26] [--rows 100000] [--dim 64] [--ids 1]

Both take the same batches in turn, so that the machine's mood is the same for both; the ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any


def measure(options: argparse.Namespace, optimizer: str, report: Any) -> dict[str, Any]:
    """Time forward and backward of both for one optimizer.

    Args:
        options: sizes, as parsed.
        optimizer: `sgd`, `adagrad` or `rowwise_adagrad`.
        report: where progress goes.

    Returns:
        Seconds per step of both (medians), their parts, the ratio ours / TorchRec's, and the largest difference of a
        weight after all steps.
    """
    import torch
    import torchrec
    from torchrec import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection as TorchRecFused

    from tpurec.embeddings import SGD, Adagrad, FusedEmbeddingBagCollection, RowWiseAdagrad

    tables = [
        EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[f"f{number}"]
        )
        for number in range(options.features)
    ]
    ours, theirs, keywords = {
        "sgd": (SGD(lr=0.01), torch.optim.SGD, {"lr": 0.01}),
        "adagrad": (Adagrad(lr=0.01), torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-8}),
        "rowwise_adagrad": (RowWiseAdagrad(lr=0.01), torchrec.optim.RowWiseAdagrad, {"lr": 0.01, "eps": 1e-8}),
    }[optimizer]
    modules = {
        "tpurec": FusedEmbeddingBagCollection(tables, ours),
        "torchrec": TorchRecFused(tables, theirs, keywords),
    }
    modules["tpurec"].load_state_dict(modules["torchrec"].state_dict())
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(options.batch_size, options.features * options.dim, generator=generator) * 1e-3
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in modules}
    with report.progress(optimizer, options.steps, "steps") as advance:
        for step in range(options.steps):
            values, lengths = _ids(options, generator)
            order = list(modules) if step % 2 else list(reversed(modules))
            for name in order:
                seconds[name].append(_timed_step(modules[name], tables, values, lengths, gradient))
            advance(1)
    difference = max(
        float((mine - other).abs().max())
        for mine, other in zip(
            modules["tpurec"].state_dict().values(), modules["torchrec"].state_dict().values(), strict=True
        )
    )
    result: dict[str, Any] = {"optimizer": optimizer}
    for name, pairs in seconds.items():
        steady = pairs[2:] or pairs
        result[f"{name}_forward_seconds"] = statistics.median(pair[0] for pair in steady)
        result[f"{name}_backward_seconds"] = statistics.median(pair[1] for pair in steady)
        result[f"{name}_step_seconds"] = statistics.median(sum(pair) for pair in steady)
    result["ratio"] = result["tpurec_step_seconds"] / result["torchrec_step_seconds"]
    result["max_difference"] = difference
    return result


def _ids(options: argparse.Namespace, generator: Any) -> tuple[Any, Any]:
    """Ids whose frequency falls with their number, as in click logs (log-uniform), and their lengths."""
    import torch

    count = options.features * options.batch_size * options.ids
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    values = ((options.rows + 1) ** uniform - 1).to(torch.int32).clamp_(max=options.rows - 1)
    return values, torch.full((options.features * options.batch_size,), options.ids, dtype=torch.int32)


def _timed_step(module: Any, tables: list[Any], values: Any, lengths: Any, gradient: Any) -> tuple[float, float]:
    from torchrec import KeyedJaggedTensor

    features = KeyedJaggedTensor([table.feature_names[0] for table in tables], values, lengths=lengths)
    started = time.perf_counter()
    output = module(features).values()
    looked_up = time.perf_counter()
    output.backward(gradient)
    return looked_up - started, time.perf_counter() - looked_up


def main() -> None:
    """Run the benchmark."""
    from rich.table import Table

    from tpurec.reporting import Reporter

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, default in (("batch-size", 4096), ("features", 26), ("rows", 100_000), ("dim", 64), ("ids", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    report = Reporter(options.json)
    results = [measure(options, optimizer, report) for optimizer in ("sgd", "adagrad", "rowwise_adagrad")]

    import torch

    values = {"threads": torch.get_num_threads(), **vars(options), "results": results}
    values.pop("json")

    def draw(console: Any) -> None:
        table = Table(title="Fused embeddings on the CPU: milliseconds of a step (forward + backward), median")
        for column in ("optimizer", "tpurec", "TorchRec (FBGEMM)", "ratio", "largest difference"):
            table.add_column(column, justify="right")
        for result in results:
            cells = [
                f"{result[f'{name}_step_seconds'] * 1e3:.1f} ({result[f'{name}_forward_seconds'] * 1e3:.1f} + "
                f"{result[f'{name}_backward_seconds'] * 1e3:.1f})"
                for name in ("tpurec", "torchrec")
            ]
            table.add_row(result["optimizer"], *cells, f"{result['ratio']:.2f}", f"{result['max_difference']:.1e}")
        console.print(table)

    report.result(values, draw)


if __name__ == "__main__":
    main()
