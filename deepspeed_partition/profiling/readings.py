"""Warnings about measurements that are hard to believe."""

from __future__ import annotations

from deepspeed_partition.planner.problem import Chain


def suspicious(chain: Chain, least_share: float = 0.0, *, in_a_run: bool = False) -> list[str]:
    """Return a sentence for each reading of a measured chain that is hard to believe; none where all is well.

    Such readings are a forward of 0 seconds, a backward of 0 seconds of a layer that has trainable parameters,
    and a spread (interquartile range) above half the median. One sentence names the widest of all
    spreads.

    Args:
        least_share: part (0 to 1) of all seconds that those of wide spread make up at least, where that is said:
            what hardly counts may be known badly.
        in_a_run: the layers were measured while they train. Then the sentence on spreads is as short as a line of
            a terminal: nobody measures one layer again there.
    """
    sentences = []
    spreads: list[tuple[float, str, str, float, float]] = []
    for layer in chain.layers:
        where = f"layer {layer.name!r}"
        if layer.forward_seconds == 0:
            sentences.append(f"{where}: its forward took 0 s, less than the clock can tell")
        if layer.backward_seconds == 0 and layer.num_trainable_parameters:
            sentences.append(
                f"{where}: its backward took 0 s, although it has {layer.num_trainable_parameters} trainable "
                "parameters: no gradient reached them. Where they are frozen for a while, the plan counts nothing "
                "for what their backward will take"
            )
        for direction, median, spread in (
            ("forward", layer.forward_seconds, layer.forward_spread_seconds),
            ("backward", layer.backward_seconds, layer.backward_spread_seconds),
        ):
            if spread is not None and spread > median / 2:
                spreads.append((spread / median if median else 0.0, where, direction, median, spread))
    if spreads and sum(each[3] for each in spreads) >= least_share * chain.compute_seconds:
        _, where, direction, median, spread = max(spreads)
        if in_a_run:
            count = f"{len(spreads)} of {2 * len(chain.layers)} times"
            return [*sentences, f"{count} vary by over half: warm up longer, on an idle machine"]
        others = len(spreads) - 1
        also = f" (so do {others} more of {2 * len(chain.layers)} times)" if others else ""
        sentences.append(
            f"{where}: its {direction} took {median:.3g} s with a spread of {spread:.3g} s, more than half of it"
            f"{also}: measure longer, or on an idle machine"
        )
    return sentences
