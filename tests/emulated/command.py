"""`python -m tests.emulated.command WORDS...` is `tpurec WORDS...` in a process where `torch.device("tpu")` exists."""

import tests.emulated.runtime  # noqa: F401  (first: torch_tpu is to find the shim)
from tpurec.cli import main

if __name__ == "__main__":
    main()
