"""DO: the replay engine.  Usable on any module by people who never see our trainer.

    with Tape(plan, ledger):
        y = step("norm", norm, x)
        z = step("up", up, y)
    z.sum().backward()          # what the plan dropped is rebuilt when backward asks for it, and only that

For those who only want less memory: ``checkpoint(fn, x)`` in the place of torch's, ``sequential(layers, x,
budget_bytes=...)``, ``apply(policy, model)`` on a model of others.
"""

from megackpt.recompute.account import KeptBytes
from megackpt.recompute.apply import Applied, apply, undo
from megackpt.recompute.call import TwoPhase
from megackpt.recompute.checkpoint import checkpoint, noop_context_fn
from megackpt.recompute.context import is_replaying, masks_kept, product_wanted
from megackpt.recompute.demand import Prefetch
from megackpt.recompute.dropout import MaskSource, dropout, keep_scale
from megackpt.recompute.handle import ReplayError
from megackpt.recompute.measure import ModuleProfile, Profile, measure
from megackpt.recompute.policies import (
    Policy,
    both,
    either,
    save_and_offload_only_these_names,
    save_anything_except_these_names,
    save_boundaries,
    save_everything,
    save_if,
    save_nothing,
    save_only_these_names,
)
from megackpt.recompute.report import Report, report
from megackpt.recompute.rng import RngLedger, Stream
from megackpt.recompute.sequential import Fitted, fit, sequential
from megackpt.recompute.span import Named
from megackpt.recompute.step import Scope, at, chain, step
from megackpt.recompute.tape import Tape
from megackpt.recompute.verify import VerifyError

__all__ = [
    "Applied", "Fitted", "KeptBytes", "MaskSource", "ModuleProfile", "Named", "Policy", "Prefetch", "Profile",
    "ReplayError", "Report", "RngLedger", "Scope", "Stream", "Tape", "TwoPhase", "VerifyError", "apply", "at",
    "both", "chain", "checkpoint", "dropout", "either", "fit", "is_replaying", "keep_scale", "masks_kept",
    "measure", "noop_context_fn", "product_wanted", "report", "save_and_offload_only_these_names",
    "save_anything_except_these_names", "save_boundaries", "save_everything", "save_if", "save_nothing",
    "save_only_these_names", "sequential", "step", "undo",
]  # fmt: skip
