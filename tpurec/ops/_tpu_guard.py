"""Makes torch_tpu refuse a compiled graph whose in-place updates it would drop.

torch_tpu 0.2.0 traces copies of a graph's inputs and gives back the graph's outputs, nothing else. A `copy_` into an
input that is not also an output is therefore lost, without an error: that is what AOTAutograd makes of an update in the
backward graph of a step whose forward alone was compiled. Tables would stay as they are while the dense part trains on.
"""

from __future__ import annotations

import torch

from tpurec.errors import TpurecError


class DroppedUpdate(TpurecError):
    """A compiled graph changes an input in place, and the change would be lost."""


def dropped_updates(graph: torch.fx.Graph) -> list[str]:
    """Inputs of a graph that are changed in place and not given back.

    Args:
        graph: as it comes to torch_tpu's compiler.

    Returns:
        Names of placeholders.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    returned = set(output.all_input_nodes)
    return [
        node.args[0].name
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is torch.ops.aten.copy_.default
        and node.args[0].op == "placeholder"
        and not returned & {node, node.args[0]}
    ]


def install() -> None:
    """Check every graph that torch_tpu compiles from now on; a second call does nothing.

    Raises:
        DroppedUpdate: later, from the compilation of such a graph.
    """
    from torch_tpu._internal.compile import compiler

    original = compiler.StaticCompiler.__call__
    if getattr(original, "checks_dropped_updates", False):
        return

    def checked(self, graph_module: torch.fx.GraphModule, *arguments, **keywords):
        names = dropped_updates(graph_module.graph)
        if names:
            raise DroppedUpdate(
                f"torch_tpu would drop the in-place updates of graph inputs {', '.join(names)}.",
                "Take the gradient inside the compiled step (torch.autograd.grad), not by loss.backward() outside.",
            )
        return original(self, graph_module, *arguments, **keywords)

    checked.checks_dropped_updates = True
    compiler.StaticCompiler.__call__ = checked
