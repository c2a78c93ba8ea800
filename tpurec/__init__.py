"""Recommendation-model training and serving on TPU slices for PyTorch and TorchRec.

Importing this package loads neither torch, torchrec, jax nor Ray, and opens no device.
"""

__version__ = "0.1.0"
