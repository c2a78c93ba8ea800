"""`torch.compile` of whole functions, with the number of programs that were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# torch gives up after 8 programs of one function; how many there may be is for `pipelines.compilations` to judge.
_RECOMPILE_LIMIT = 1 << 20


class Compiler:
    """Compiles functions whole, one program per shape of their arguments.

    Args:
        backend: name of a `torch.compile` backend, such as `tpu`.

    Attributes:
        programs: made so far.
    """

    def __init__(self, backend: str) -> None:
        self.programs = 0
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, function: Function) -> Function:
        """Compile a function; nothing happens before its first call.

        Args:
            function: of tensors; one graph, with the gradient inside if there is one.

        Returns:
            What to call in its place.
        """
        compiled = torch.compile(function, backend=self._compile, fullgraph=True, dynamic=False)

        def call(*arguments: Any) -> Any:
            with torch._dynamo.config.patch(
                trace_autograd_ops=True,
                recompile_limit=_RECOMPILE_LIMIT,
                accumulated_recompile_limit=_RECOMPILE_LIMIT,
            ):
                return compiled(*arguments)

        return call  # type: ignore[return-value]

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.programs += 1
        return self._backend(graph, inputs)
