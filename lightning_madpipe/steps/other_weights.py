"""A step that uses weights otherwise than by its call of the layers: no rank of a pipeline has them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_madpipe.compat.elsewhere import GradientElsewhereError
from lightning_madpipe.finding.step_call import line_of_users
from lightning_madpipe.steps.metrics import metrics_of


def uses_weights(step: str, called: str, error: Exception) -> str:
    """Why a step cannot run that asks for weights of another rank, as ``error`` names them."""
    name = str(error).partition(" is asked for ")[0]
    if isinstance(error, GradientElsewhereError):
        return (
            f"{step} reads the gradient of {name} ({line_of_users(error)}), and in a pipeline a step has the "
            "weights of one stage only: read gradients in on_before_optimizer_step, in which each rank has those "
            "of its layers, and self.log() works; for a norm over all of them add the squares by "
            "torch.distributed.all_reduce"
        )
    return (
        f"{step} uses {name} other than by its call of {called} ({line_of_users(error)}), and in a pipeline a "
        "step has the weights of one stage: for a penalty use weight_decay, to change weights or "
        "log a norm a hook (on_train_batch_end), or let the layers return what is needed; a step that runs the "
        "network by itself needs a strategy that has the whole model on each device, such as 'ddp'"
    )


def loss_depends_on_weights(step: str, called: str, name: str) -> str:
    """Why a step cannot run whose loss has gradients by weights that are not those of its call."""
    return (
        f"the loss of {step} depends on weights in other ways than through {called} ({name}), such as by a "
        "penalty, or by weights of its terms that are learned, or by a head that was not called at first, and no "
        "rank has all: use weight_decay; let layers return what it needs, as in `return out, self.log_vars` in "
        "forward(): call there a module that has weights, such as a projector, and a head that takes labels (with "
        "self(x, y) in the step); or call all heads for each batch and choose by torch.where"
    )


def other_weight(
    module: nn.Module,
    loss: Tensor,
    ends: Collection[Any],
    among: Collection[Any] | None = None,
    returned: Iterable[Tensor] = (),
) -> str | None:
    """The name of a weight that gradients of ``loss`` reach otherwise than through the outputs, ``ends``.

    Args:
        among: The weights that are looked for; None: all but those of metrics.
        returned: The outputs. One that is a weight itself gets its gradient as an output.
    """
    known = {weight for metric in metrics_of(module).values() for weight in metric.parameters()}
    known |= {output for output in returned if isinstance(output, nn.Parameter)}
    todo, seen = [loss.grad_fn], set(ends)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            is_sought = leaf not in known if among is None else leaf in among
            if isinstance(leaf, nn.Parameter) and is_sought:
                return next((name for name, each in module.named_parameters() if each is leaf), "a weight")
            todo.extend(following for following, _ in node.next_functions)
    return None
