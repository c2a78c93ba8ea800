"""How good a ranking of movies is for each user: recall and NDCG at k, beside a ranking by popularity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table


def ranking_metrics(
    scores: np.ndarray, seen: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], k: int
) -> dict[str, float]:
    """Rank all items that a user has not seen, and look for the held-out ones among the first k.

    Args:
        scores: float `[users, items]`, higher is better.
        seen: for each user the items that are not ranked.
        held_out: for each user the items that should come first; users without any are left out.
        k: length of the list.

    Returns:
        `recall`: share of a user's held-out items in the list; `ndcg`: the sum of 1 / log2(rank + 1) of those, over the
        largest possible sum (Jarvelin and Kekalainen 2002); both averaged over users; and `users`.

    Raises:
        ValueError: no user has a held-out item.
    """
    discounts = 1.0 / np.log2(np.arange(2, k + 2))
    recalls, gains = [], []
    for user, wanted in enumerate(held_out):
        if not len(wanted):
            continue
        row = scores[user].astype(np.float64)
        row[list(seen[user])] = -np.inf
        # Stable: of equal scores the lower item number comes first, whatever the machine.
        top = np.argsort(-row, kind="stable")[:k]
        hit = np.isin(top, list(wanted))
        recalls.append(hit.sum() / len(wanted))
        gains.append((hit * discounts[: len(top)]).sum() / discounts[: len(wanted)].sum())
    if not recalls:
        raise ValueError("no user has a held-out item")
    return {"recall": float(np.mean(recalls)), "ndcg": float(np.mean(gains)), "users": len(recalls)}


def popularity_scores(seen: Sequence[Sequence[int]], num_items: int) -> np.ndarray:
    """Score every item by how many users have it, the same for all users.

    Args:
        seen: for each user the items of the training data.
        num_items: items.

    Returns:
        float64 `[users, items]`, a view of one row.
    """
    counts = np.bincount(np.concatenate([np.asarray(items, dtype=np.int64) for items in seen]), minlength=num_items)
    return np.broadcast_to(counts.astype(np.float64), (len(seen), num_items))


def comparison(
    scores: np.ndarray, seen: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], k: int
) -> dict[str, float]:
    """Metrics of a model's ranking and of popularity's.

    Args:
        scores: of the model, as of `ranking_metrics`.
        seen: as of `ranking_metrics`; popularity is counted here.
        held_out: as of `ranking_metrics`.
        k: length of the list.

    Returns:
        `recall_at_K`, `ndcg_at_K`, the same with `popularity_` in front, `recall_margin` (a ratio) and `users`.
    """
    model = ranking_metrics(scores, seen, held_out, k)
    popular = ranking_metrics(popularity_scores(seen, scores.shape[1]), seen, held_out, k)
    found = {f"{name}_at_{k}": round(model[name], 5) for name in ("recall", "ndcg")}
    found |= {f"popularity_{name}_at_{k}": round(popular[name], 5) for name in ("recall", "ndcg")}
    margin = model["recall"] / popular["recall"] if popular["recall"] else float("inf")
    return {**found, "recall_margin": round(margin, 3), "users": model["users"]}


def show(console: Console, title: str, result: dict[str, float], k: int) -> None:
    """Print the comparison for people.

    Args:
        console: where to.
        title: above the table.
        result: of `comparison`.
        k: length of the list.
    """
    table = Table("", f"recall@{k}", f"NDCG@{k}", title=title)
    for label, prefix in (("popularity", "popularity_"), ("this model", "")):
        values = (result[f"{prefix}{name}_at_{k}"] for name in ("recall", "ndcg"))
        table.add_row(label, *(f"{value:.4f}" for value in values))
    console.print(table)
    console.print(f"{result['recall_margin']:.2f} x the recall of popularity, over {result['users']} users")
