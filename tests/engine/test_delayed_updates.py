"""The loop that keeps old weights, held against what can be computed in another way."""

from __future__ import annotations

import torch
from torch import nn

from tests.engine.delayed_updates import flush, train


def _problem(num_batches: int, per_update: int):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)]
    generator = torch.Generator().manual_seed(1)
    batches = [
        [
            (torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator))
            for _ in range(per_update)
        ]
        for _ in range(num_batches)
    ]
    return layers, batches


def test_without_delay_it_is_ordinary_training():
    layers, batches = _problem(6, 3)
    found = train(
        layers, [0, 2, 4], batches, nn.functional.mse_loss, flush(3), lambda p: torch.optim.Adam(p, 1e-2), clip=0.5
    )
    model = nn.Sequential(*layers)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        of_batch = [nn.functional.mse_loss(model(inputs), labels) for inputs, labels in batch]
        (sum(of_batch) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(sum(of_batch).item() / 3)
    torch.testing.assert_close(found.losses, losses)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found.weights[name], weight.detach())


def test_a_delay_uses_the_gradient_of_old_weights():
    """One weight, loss w^2 / 2, so each gradient is the version that was used."""
    for delay, momentum in ((1, 0.0), (2, 0.9)):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        batches = [[(torch.ones(1, 1), torch.zeros(1, 1))] for _ in range(8)]
        found = train(
            [layer], [0, 1], batches, lambda out, _: (out**2).sum() / 2, lambda stage, b, d=delay: max(0, b - d),
            lambda p, m=momentum: torch.optim.SGD(p, 0.5, momentum=m),
        )  # fmt: skip
        history, velocity = [1.0], 0.0
        for number in range(8):
            velocity = momentum * velocity + history[max(0, number - delay)]
            history.append(history[-1] - 0.5 * velocity)
        torch.testing.assert_close(found.weights["0.weight"].item(), history[-1], rtol=1e-5, atol=0.0)
        torch.testing.assert_close(
            found.losses, [history[max(0, n - delay)] ** 2 / 2 for n in range(8)], rtol=1e-5, atol=0.0
        )


def test_stages_use_versions_of_their_own_and_bf16_keeps_masters():
    layers, batches = _problem(5, 2)

    def by_stage(stage: int, micro_batch: int) -> int:
        return max(0, (micro_batch - (2 - stage)) // 2)

    def sgd(weights):
        return torch.optim.SGD(weights, 0.1)

    synchronous = train(layers, [0, 2, 4], batches, nn.functional.mse_loss, flush(2), sgd)
    delayed = train(layers, [0, 2, 4], batches, nn.functional.mse_loss, by_stage, sgd)
    assert synchronous.losses[0] == delayed.losses[0] and synchronous.losses[1:] != delayed.losses[1:]
    rounded = train(
        layers, [0, 2, 4], batches, lambda out, y: nn.functional.mse_loss(out.float(), y), by_stage, sgd, bf16=True
    )
    assert all(weight.dtype is torch.bfloat16 for weight in rounded.weights.values())
    torch.testing.assert_close(rounded.losses, delayed.losses, rtol=0.05, atol=0.0)
