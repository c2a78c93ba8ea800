"""A linear model on hashed features, fitted to its optimum: what the planted model must be out of reach for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import scipy.optimize
import scipy.sparse
import scipy.stats

from tpurec.features import Columns, Schema, Transformer


def design(columns: Columns, schema: Schema) -> scipy.sparse.csr_matrix:
    """Transformed rows as one sparse matrix: dense values, then one column a table row."""
    blocks = [scipy.sparse.csr_matrix(columns.dense)]
    for feature in schema.sparse:
        column = columns.sparse[feature.name]
        weights = np.ones(len(column.rows), np.float32) if column.weights is None else column.weights
        shape = (columns.num_rows, feature.num_embeddings)
        blocks.append(scipy.sparse.csr_matrix((weights, column.rows, column.offsets), shape))
    return scipy.sparse.hstack(blocks, "csr")


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of (click, no click) pairs in the right order; ties count half."""
    clicks = labels > 0.5
    ranks = scipy.stats.rankdata(scores)
    positive, negative = clicks.sum(), (~clicks).sum()
    return (ranks[clicks].sum() - positive * (positive + 1) / 2) / (positive * negative)


def fit(features: scipy.sparse.csr_matrix, labels: np.ndarray, penalty: float) -> np.ndarray:
    """Coefficients, the bias last, that minimise mean log loss + penalty / 2 * |coefficients|^2, by L-BFGS."""
    transposed = features.T.tocsr()
    size = features.shape[0]

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        coefficients, bias = parameters[:-1], parameters[-1]
        margin = (features @ coefficients + bias) * (2 * labels - 1)
        error = -(2 * labels - 1) / (1 + np.exp(margin)) / size
        gradient = np.append(transposed @ error + penalty * coefficients, error.sum())
        return np.logaddexp(0, -margin).mean() + penalty / 2 * coefficients @ coefficients, gradient

    start = np.zeros(features.shape[1] + 1)
    return scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 150, "ftol": 1e-6}).x


def linear_share(
    train: pa.Table, test: pa.Table, schema: Schema, best_auc: float, penalties: tuple[float, ...] = (1e-3, 3e-4)
) -> float:
    """(AUC - 0.5) / (best AUC - 0.5) with the best of several penalties, chosen on the test rows in its favour."""
    transform = Transformer(schema)
    trained, tested = transform(train), transform(test)
    mean, std = trained.dense.mean(axis=0), trained.dense.std(axis=0)
    parts = []
    for columns in (trained, tested):
        columns.dense[:] = (columns.dense - mean) / std
        parts.append(design(columns, schema).astype(np.float64))
    # Rows that no training example looks up keep coefficient 0 whatever the fit, so leave them out of it.
    used = np.unique(parts[0].indices)
    parts = [part[:, used] for part in parts]
    reached = []
    for penalty in penalties:
        found = fit(parts[0], trained.labels.astype(np.float64), penalty)
        reached.append(auc(parts[1] @ found[:-1], tested.labels))
    return (max(reached) - 0.5) / (best_auc - 0.5)
