"""The layout of Criteo's display-advertising logs: a label, 13 integer columns, 26 columns of hex ids."""

from __future__ import annotations

LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
SPARSE = tuple(f"C{number}" for number in range(1, 27))
# The order of the fields in a line of a file without header.
COLUMNS = (LABEL, *DENSE, *SPARSE)
