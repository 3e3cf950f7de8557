"""What a step reads of what a hook on a layer has written, such as features in a dictionary: it may log it.

The hook runs where its layer runs. Where that is the last stage, and the step runs right behind it, on the same
micro-batch, the value is there. Elsewhere it is not: to log it is left out, which is said, and whatever else needs
it is refused. A loss that is made of it is refused in either case, for in the end the plan says where the layer
runs, and no gradient would come to another rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves, tree_map

from lightning_madpipe.steps.hooks_that_collect import MUTATORS

NOT_HERE = object()
"""In the place of a value that is not on this rank."""

NOT_LOGGED = (
    "{step} logs {name!r}, which is made of {shown}, and {hook} writes that on the rank that has its layer, once "
    "per micro-batch: it is not logged. Return it from forward(), `return logits, feature`, or let the hook log "
    "it by a logger of that rank"
)


class HookValue:
    """What stands in a step for what a hook writes, and for what the step computes of it.

    Args:
        value: The value, or ``NOT_HERE``.
        of: What the hook writes, in words, with the hook.
        refuse: Raises the host's exception for what needs a value that is not here.
    """

    __slots__ = ("_of", "_refuse", "_value")

    def __init__(self, value: Any, of: tuple[str, str], refuse: Callable[[], NoReturn]) -> None:
        self._value, self._of, self._refuse = value, of, refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        given = arguments, dict(keywords or {})
        first = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, HookValue))
        own, by_name = tree_map(value_of, given)
        if any(leaf is NOT_HERE for leaf in tree_leaves((own, by_name))):
            return first._like(NOT_HERE)
        return first._like(function(*own, **by_name))

    def __getattr__(self, name: str) -> Any:
        if self._value is not NOT_HERE:
            return self._like(getattr(self._value, name))
        if name in MUTATORS or name.startswith("__"):
            self._refuse()
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        own, by_name = tree_map(value_of, (arguments, keywords))
        if self._value is NOT_HERE or any(leaf is NOT_HERE for leaf in tree_leaves((own, by_name))):
            return self._like(NOT_HERE)
        return self._like(self._value(*own, **by_name))

    def __getitem__(self, key: Any) -> Any:
        return self if self._value is NOT_HERE else self._like(self._value[value_of(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._needed()[value_of(key)] = value_of(value)

    def __iter__(self) -> Iterator[Any]:
        return map(self._like, iter(self._needed()))

    def __len__(self) -> int:
        return len(self._needed())

    def __bool__(self) -> bool:
        return bool(self._needed())

    def __float__(self) -> float:
        return float(self._needed())

    def __int__(self) -> int:
        return int(self._needed())

    def __contains__(self, item: Any) -> bool:
        return item in self._needed()

    def __hash__(self) -> int:
        return hash(self._needed())

    def __eq__(self, other: object) -> bool:
        return bool(self._needed() == value_of(other))

    def __repr__(self) -> str:
        return "<on another rank>" if self._value is NOT_HERE else repr(self._value)

    def _needed(self) -> Any:
        if self._value is NOT_HERE:
            self._refuse()
        return self._value

    def _like(self, value: Any) -> Any:
        return (
            value
            if isinstance(value, bool | int | float | str | None)
            else HookValue(value, self._of, self._refuse)
        )


def value_of(value: Any) -> Any:
    """The value that a :class:`HookValue` stands for; anything else itself."""
    return value._value if isinstance(value, HookValue) else value


def _of_operator(name: str, *, is_reflected: bool = False) -> Callable[..., Any]:
    function = getattr(operator, name)

    def called(self: HookValue, *others: Any) -> Any:
        return self._like(function)(*((*others, self) if is_reflected else (self, *others)))

    return called


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(HookValue, f"__{_name}__", _of_operator(f"__{_name}__"))
    setattr(HookValue, f"__r{_name}__", _of_operator(f"__{_name}__", is_reflected=True))
for _name in ("neg", "abs", "lt", "le", "gt", "ge"):
    setattr(HookValue, f"__{_name}__", _of_operator(f"__{_name}__"))


def refuse_in_loss(returned: Any) -> None:
    """Refuse what a step returns where it is made of what a hook writes.

    Raises:
        Exception: the host's, with a sentence.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if isinstance(loss, HookValue):
        loss._refuse()


def why_not_logged(value: Any, step: str, name: str) -> str | None:
    """Why ``self.log`` does not log ``value``, in words; None: it does."""
    if not isinstance(value, HookValue) or value._value is not NOT_HERE:
        return None
    shown, hook = value._of
    return NOT_LOGGED.format(step=step, name=name, shown=shown, hook=hook)
