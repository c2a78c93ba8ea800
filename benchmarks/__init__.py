"""Benchmarks: `python -m benchmarks.NAME [--json]`. Each prints ratios measured side by side in one run."""
