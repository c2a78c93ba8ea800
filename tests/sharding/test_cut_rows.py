"""Rows that are cut into several tensors: every row is in one of them, and its view is where the kernels look."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpurec.embeddings.layout import Packed
from tpurec.errors import ConfigError
from tpurec.kernels.storage import Storage, unpack
from tpurec.sharding.cut_rows import CutRows

TPU = SimpleNamespace(type="tpu")  # torch knows the name only where torch_tpu has registered it
CPU = torch.device("cpu")
LIMIT = 4096


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.float32), (24, torch.float32), (16, torch.bfloat16)])
def test_views_of_a_range_are_the_rows_that_the_kernels_count_through(width, dtype):
    num_rows, limit = 1000, 3 * LIMIT if width == 24 else LIMIT
    storage = Storage(num_rows, width, str(dtype).removeprefix("torch."), limit)
    cut = CutRows(TPU, num_rows, width, dtype, limit, "stack")
    assert cut.num_tensors == storage.num_parts > 2
    tensors = cut.allocate(CPU)  # the layout is a TPU's, the memory is here
    assert [tuple(one.shape) for one in tensors] == [storage.part_shape] * storage.num_parts
    for start, stop in ((0, 1), (1, 130), (130, 130), (130, 999), (999, 1000)):
        views = cut.views(tensors, start, stop)
        assert sum(len(view) for view in views) == stop - start and len(views) >= 1
        numbers = torch.arange(start, stop, dtype=torch.float32)[:, None] % 251  # which bfloat16 tells apart
        for view, rows in zip(views, numbers.split([len(view) for view in views]), strict=True):
            view.copy_(rows.expand(-1, width))
    whole = np.asarray(unpack([jnp.asarray(one.numpy()) for one in tensors], storage), np.float32)
    assert np.array_equal(whole, np.broadcast_to(np.arange(num_rows)[:, None] % 251, whole.shape))


def test_other_devices_keep_rows_in_one_tensor():
    cut = CutRows(CPU, 1000, 12, torch.float16, LIMIT, "stack")
    (tensor,) = cut.allocate(CPU)
    assert tensor.shape == (1000, 12) and [len(view) for view in cut.views([tensor], 3, 900)] == [897]


def test_what_a_tpu_does_not_take_is_named():
    with pytest.raises(ConfigError, match=r"the stack: embedding_dim 12: .*Use 8 or 16"):
        CutRows(TPU, 1000, 12, torch.float32, LIMIT, "the stack")
    with pytest.raises(ConfigError, match="max_tensor_bytes 100"):
        CutRows(TPU, 1000, 8, torch.float32, 100, "the stack")


def test_a_whole_table_is_one_tensor_and_its_size_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"tables a: 19\.1 GiB; one tensor of a TPU takes 16 GiB.*--workers"):
        Packed(40_000_000, 128, torch.float32, "tables a")
