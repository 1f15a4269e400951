"""Let an LSTM's layer, which oneDNN computes, keep what its gradient reads.

Dynamo traces ``nn.LSTM`` where ``torch._dynamo.config.allow_rnn`` says so, and PyTorch decomposes
it for CPUs into calls of ``aten.mkldnn_rnn_layer``. This kernel returns a workspace for its
gradient only while gradients are recorded, which a compiled forward never does: the result is None
in the place of a tensor, at which ``aot_eager`` and Inductor fail (torch 2.13). So a layer that is
traced with gradients is ``fusec::lstm_layer``, the same kernel where they are recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from fusec.frontend.ops.registry import eager_kernel

_layer = torch.ops.aten.mkldnn_rnn_layer.default


@eager_kernel(str(_layer._schema).replace("aten::mkldnn_rnn_layer", "lstm_layer"), _layer)
def lstm_layer(*args: Any) -> Any:
    """Call oneDNN's layer as in eager training: it returns the workspace, too."""
    plain = (arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)
    with torch.enable_grad():
        return _layer(*plain)


def keeping_its_workspace(*args: Any) -> Any:
    """Decompose oneDNN's layer into fusec's, where gradients are traced."""
    if not torch.is_grad_enabled():
        return NotImplemented
    return torch.ops.fusec.lstm_layer.default(*args)
