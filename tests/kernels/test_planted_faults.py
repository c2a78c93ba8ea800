"""The lists of planted faults in docs/kernels.md are those that the tests plant."""

from pathlib import Path

import pytest

from tests.kernels import (
    test_embedding_bag_sparsecore,
    test_embedding_bag_tensorcore,
    test_embedding_update_sparsecore,
    test_embedding_update_tensorcore,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
PLANTED = {
    "SparseCore lookup": test_embedding_bag_sparsecore,
    "TensorCore lookup": test_embedding_bag_tensorcore,
    "SparseCore update": test_embedding_update_sparsecore,
    "TensorCore update": test_embedding_update_tensorcore,
}


def _documented() -> dict[str, list[str]]:
    """Heading -> faults, of every table of the document whose headings are kernels."""
    found: dict[str, list[str]] = {}
    columns: list[str] = []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and set(cells) <= set(PLANTED):
            columns = cells
        elif not cells:
            columns = []
        elif columns:
            for column, cell in zip(columns, cells, strict=True):
                if cell.strip("-"):
                    found.setdefault(column, []).append(cell)
    return found


@pytest.mark.parametrize("column", PLANTED)
def test_documented_faults_are_the_planted_ones(column):
    assert sorted(_documented()[column]) == sorted(PLANTED[column].FAULTS)
