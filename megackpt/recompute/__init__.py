"""DO: the replay engine.  Usable on any module by people who never see our trainer.

    with Tape(plan, ledger):
        y = step("norm", norm, x)
        z = step("up", up, y)
    z.sum().backward()          # what the plan dropped is rebuilt when backward asks for it, and only that

For those who only want less memory: ``checkpoint(fn, x)`` in the place of torch's.
"""

from megackpt.recompute.account import KeptBytes
from megackpt.recompute.checkpoint import checkpoint, noop_context_fn
from megackpt.recompute.context import is_replaying, masks_kept, product_wanted
from megackpt.recompute.dropout import MaskSource, dropout, keep_scale
from megackpt.recompute.handle import ReplayError
from megackpt.recompute.rng import RngLedger, Stream
from megackpt.recompute.step import Scope, at, chain, step
from megackpt.recompute.tape import Tape
from megackpt.recompute.verify import VerifyError

__all__ = [
    "KeptBytes", "MaskSource", "ReplayError", "RngLedger", "Scope", "Stream", "Tape", "VerifyError", "at", "chain",
    "checkpoint", "dropout", "is_replaying", "keep_scale", "masks_kept", "noop_context_fn", "product_wanted", "step",
]  # fmt: skip
