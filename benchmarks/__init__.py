"""Benchmarks: `python -m benchmarks.NAME [--json]`. Each prints ratios measured side by side in one run."""

import os

# As `tpurec.cli` does: with torch_tpu installed `import torch` would load it, at a cost and with log lines.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
