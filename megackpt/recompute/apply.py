"""Apply a plan to a module somebody else wrote: chosen submodules become steps.

    with apply(save_only_these_names("attention"), model, steps=["layers.*.attention", "layers.*.mlp", nn.LayerNorm]):
        model(x).sum().backward()

A step must see its submodule's forward and nothing else of the module, so the submodule's ``forward`` is covered by an
object on the instance: its class, parameters, buffers, hooks and state_dict names stay as they are, its hooks run once,
and a deep or pickled copy is wrapped around itself, not around the original.  ``undo`` takes the cover off.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.nn import Module

from megackpt.plan import ChunkPlan
from megackpt.recompute.account import KeptBytes
from megackpt.recompute.context import state
from megackpt.recompute.report import Report, report
from megackpt.recompute.rng import RngLedger
from megackpt.recompute.step import at
from megackpt.recompute.tape import Tape
from megackpt.recompute.tiers.base import Tier

Choice = str | type[Module]


class Cover:
    """Stands for ``module.forward``.  Holds its module, so copies of a module cover themselves."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.before = module.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Any:
        """The forward underneath; also makes ``inspect.signature`` tell the truth."""
        if self.before is not None:
            return self.before
        return MethodType(type(self.module).forward, self.module)

    def put_on(self) -> None:
        self.module.__dict__["forward"] = self

    def take_off(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            raise RuntimeError(
                f"the forward of {type(self.module).__name__} was replaced after the plan was applied; undo that first"
            )
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before


class StepCover(Cover):
    """Runs the module's forward as a step."""

    def __init__(self, module: Module, address: str, name: str) -> None:
        super().__init__(module)
        self.address = address
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return at(self.address)(self.name, self.__wrapped__, *args, **kwargs)


class TapeCover(Cover):
    """Opens a tape around the outermost module's forward."""

    def __init__(self, module: Module, plan: ChunkPlan, ledger: RngLedger | None, options: dict[str, Any]) -> None:
        super().__init__(module)
        self.plan = plan
        self.ledger = ledger
        self.options = options
        self.tapes: list[weakref.ref[Tape]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        enclosing = state.now.tape
        ledger = enclosing.ledger if self.ledger is None and enclosing is not None else self.ledger
        tape = Tape(self.plan, ledger, **self.options)
        if self.options["account"] is not None:
            self.tapes = [ref for ref in self.tapes if ref() is not None]
            self.tapes.append(weakref.ref(tape))
        with tape:
            return self.__wrapped__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tapes": []}


class Applied:
    """A plan on a module.  As a context manager it undoes itself."""

    def __init__(self, covers: Sequence[Cover], steps: tuple[str, ...]) -> None:
        self._covers = list(covers)
        self.steps = steps
        """Qualified names of the submodules that are steps now."""

    def undo(self) -> None:
        """Take every cover off; nothing of the plan is left on the module.  A backward may still come."""
        while self._covers:
            self._covers[-1].take_off()
            self._covers.pop()

    def report(self) -> Report:
        """What is kept now by forwards whose backward has not ended; needs ``account``."""
        tapes = [ref() for cover in self._covers if isinstance(cover, TapeCover) for ref in cover.tapes]
        return report([tape for tape in tapes if tape is not None])

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *failure: object) -> None:
        self.undo()


def apply(
    plan: ChunkPlan,
    module: Module,
    steps: Iterable[Choice] | None = None,
    *,
    ledger: RngLedger | None = None,
    account: KeptBytes | None = None,
    tiers: Mapping[str, Tier] | None = None,
    label: str = "",
    verify: bool = False,
) -> Applied:
    """Make submodules of ``module`` steps, and open a tape with ``plan`` around each of its forwards.

    ``steps``: qualified names, patterns of them (``layers.*.mlp``; a star stands for one part of a name, ``**`` for any
    number), or types.  A submodule inside another chosen one is a step of its replay.  Without ``steps`` the plan's own
    names are taken: address ``layers.3``, step ``mlp`` is the submodule ``layers.3.mlp``; a policy, which has none,
    takes the direct children.  ``ledger``: by default that of an enclosing tape, else a new one.  The rest are options
    of :class:`Tape`.

    Returns a handle with ``undo``.  Raises ValueError for a choice that matches nothing, and if ``module`` has a plan
    on it already.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule.__dict__.get("forward"), Cover):
            raise ValueError(f"{name or 'the module'} has a plan on it already; undo that first")
    chosen = _chosen(plan, module, steps)
    covers: list[Cover] = []
    for name, submodule in chosen.items():
        address, _, step = name.rpartition(".")
        covers.append(StepCover(submodule, address, step))
    options = {"account": account, "tiers": tiers, "label": label, "verify": verify}
    covers.append(TapeCover(module, plan, ledger, options))
    for cover in covers:
        cover.put_on()
    return Applied(covers, tuple(chosen))


def undo(module: Module) -> None:
    """Take a plan off a module whose handle is not at hand: a copy of one that had a plan, or one from a file."""
    for submodule in module.modules():
        cover = submodule.__dict__.get("forward")
        if isinstance(cover, Cover):
            cover.take_off()


def _chosen(plan: ChunkPlan, module: Module, steps: Iterable[Choice] | None) -> dict[str, Module]:
    names = {name: m for name, m in module.named_modules() if name}
    if steps is None:
        wanted = [f"{a}.{s}" if a else s for a, saved in plan.save_sets.items() for s in saved.decisions]
        steps = wanted or [name for name, _ in module.named_children()]
    found: dict[str, Module] = {}
    for choice in steps:
        if isinstance(choice, type):
            matches = [name for name, m in names.items() if isinstance(m, choice)]
        else:
            matches = [name for name in names if _pattern(choice).fullmatch(name)]
        if not matches:
            what = choice.__name__ if isinstance(choice, type) else choice
            raise ValueError(f"{what} matches no submodule of {type(module).__name__}; it has {_some(names)}")
        found.update((name, names[name]) for name in matches)
    return {name: m for name, m in names.items() if name in found}  # in the module's order


def _pattern(choice: str) -> re.Pattern[str]:
    parts = {"**": ".*", "*": "[^.]*"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*?)", choice)))


def _some(names: Mapping[str, Module], most: int = 12) -> str:
    listed = list(names)[:most]
    return ", ".join(listed) + (f" and {len(names) - most} more" if len(names) > most else "")
