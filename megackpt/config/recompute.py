"""What backward rebuilds instead of keeping.

====================  ==============================  =========================================
granularity           kept per layer (fp16/bf16)      share of the step replayed (GPT shape)
====================  ==============================  =========================================
none                  34 s b h / t (+ 5 a s s b / t)  0
free                  none less norm outputs,         about 0
                      activation output and masks
selective             none less the named modules     the modules only
full, boundaries      4 s b h / t                     (14 + 4s/h) / (72 + 12s/h), no reduction
full, layer-input     2 s b h / t                     (16 + 4s/h) / (72 + 12s/h), 1 reduction
full, uniform k       2 s b h / t per k layers        (24k - 8 + 4ks/h) / (k (72 + 12s/h))
auto                  what fits the memory budget     the least that makes it fit, per stage and chunk
====================  ==============================  =========================================

The 5 a s s b term exists with the unfused core only: that is what selective with ``core_attn`` was made for.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.config.checks import above_zero, at_least, did_you_mean, either, one_of
from megackpt.config.errors import UsageError

GRANULARITIES = ("none", "free", "selective", "full", "auto")
METHODS = ("uniform", "block")
KEEPS = ("boundaries", "layer-input")
DEFAULT_MODULES = ("core_attn",)
MEGATRON_MODULES = ("core_attn", "layernorm", "mlp")
STEPS = (
    "attn.norm",
    "attn.gather",
    "attn.qkv",
    "attn.qknorm",
    "attn.rope",
    "attn.core",
    "mlp.norm",
    "mlp.gather",
    "mlp.up",
    "mlp.act",
)
MODULES = (*MEGATRON_MODULES, *STEPS)
CONSUMERS = ("attn.proj", "attn.reduce", "attn.residual", "mlp.down", "mlp.reduce", "mlp.residual")
"""Steps that selective cannot drop: nothing saved depends on them, or they are the boundaries that stay."""
MOST_GIB = 1_000_000
"""Of a budget: no rank has a pebibyte, but bytes are often given where GiB are meant."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """The policy of recomputation; what it does to bytes and work is the table at the head of this file."""

    granularity: str = "none"
    method: str | None = None
    """Of full: uniform replays groups of num_layers layers, block the first num_layers layers of each stage."""
    num_layers: int | None = None
    """Of full: layers per group (uniform; a last group is clipped), or replayed layers per stage (block)."""
    modules: tuple[str, ...] = DEFAULT_MODULES
    """Of selective: Megatron's module names or names of steps."""
    keep: str = "boundaries"
    """Of full with single layers: boundaries also keeps the residual after attention, so no reduction is replayed."""

    distribute: bool = False
    """Of full: every tensor-parallel rank keeps its part of a boundary, and gathers the rest at replay."""
    ahead: int = 0
    """Layers of a chunk that are rebuilt while the gradient of its output is still on its way."""
    plan_file: str | None = None
    """A plan in JSON that is run as it is; replaces the policy."""
    verify: bool = False
    """Compare every replayed tensor with a digest of the original."""
    memory_budget_gib: float | None = None
    """Of auto: memory of a rank, state included.  None: what the GPU has."""
    adapt: bool = False
    """Of auto: choose again between steps, by the measured peak."""

    def __post_init__(self) -> None:
        if self.plan_file is not None and self.granularity != "none":
            raise UsageError(
                f"--recompute-plan {self.plan_file} contradicts --recompute-granularity {self.granularity}: a plan says"
                " itself what is kept. Leave one of them out."
            )
        if self.distribute and self.granularity != "full":
            raise UsageError(
                "--distribute-saved-activations needs --recompute-granularity full: it splits the kept boundaries;"
                f" got granularity {self.granularity}."
            )
        one_of("--recompute-granularity", self.granularity, GRANULARITIES)
        at_least("--recompute-ahead-layers", self.ahead, 0)
        if self.ahead and (self.plan_file is not None or self.granularity in ("none", "auto")):
            what = "--recompute-plan" if self.plan_file else f"--recompute-granularity {self.granularity}"
            raise UsageError(
                f"--recompute-ahead-layers {self.ahead} contradicts {what}: it is a detail of free, selective and full."
                " Leave one of them out."
            )
        self._check_auto()
        one_of("--recompute-keep", self.keep, KEEPS)
        if self.method is not None:
            one_of("--recompute-method", self.method, METHODS)
        at_least("--recompute-num-layers", self.num_layers, 1)
        self._check_modules()
        if self.granularity == "full":
            self._complete_full()
        else:
            self._refuse_details_of_full()

    def _check_auto(self) -> None:
        if self.memory_budget_gib is not None:
            above_zero("--memory-budget-gib", self.memory_budget_gib)
            if self.memory_budget_gib > MOST_GIB:
                got = f"{self.memory_budget_gib:g}"
                raise UsageError(f"--memory-budget-gib is the memory of one rank, at most {MOST_GIB:,}; got {got}.")
        for flag, given in (("--memory-budget-gib", self.memory_budget_gib), ("--recompute-adapt", self.adapt or None)):
            if given is not None and self.granularity != "auto":
                value = "" if given is True else f" {given:g}"
                what = "--recompute-plan" if self.plan_file else f"--recompute-granularity {self.granularity}"
                raise UsageError(
                    f"{flag}{value} contradicts {what}, which says itself what is kept: use --recompute-granularity"
                    f" auto, or leave {flag} out."
                )

    def _complete_full(self) -> None:
        if self.modules != DEFAULT_MODULES:
            raise UsageError(
                f"--recompute-modules {' '.join(self.modules)} contradicts --recompute-granularity full, which drops"
                " all of them: use --recompute-granularity selective."
            )
        if self.method == "block" and self.num_layers is None:
            raise UsageError(
                "--recompute-method block needs --recompute-num-layers: how many layers of each stage are replayed."
            )
        object.__setattr__(self, "method", self.method or "uniform")
        object.__setattr__(self, "num_layers", self.num_layers or 1)

    def _refuse_details_of_full(self) -> None:
        details: tuple[tuple[str, object], ...] = (
            ("--recompute-method", self.method),
            ("--recompute-num-layers", self.num_layers),
            ("--recompute-keep", self.keep if self.keep != "boundaries" else None),
        )
        for flag, value in details:
            if value is not None:
                raise UsageError(
                    f"{flag} {value} contradicts --recompute-granularity {self.granularity}: it says how full"
                    f" recomputation is done. Use --recompute-granularity full, or leave {flag} out."
                )
        if self.granularity != "selective" and self.modules != DEFAULT_MODULES:
            raise UsageError(
                f"--recompute-modules {' '.join(self.modules)} contradicts --recompute-granularity"
                f" {self.granularity}: use --recompute-granularity selective."
            )

    def _check_modules(self) -> None:
        if not self.modules:
            raise UsageError(f"--recompute-modules needs at least one name: {either(MODULES)}.")
        for module in self.modules:
            if module in CONSUMERS:
                raise UsageError(
                    f"--recompute-modules {module}: replaying this step frees nothing, since it is a boundary or only"
                    " feeds one. To keep less than every boundary use --recompute-granularity full."
                )
            if module not in MODULES:
                raise UsageError(
                    f"--recompute-modules takes names among {', '.join(MODULES)}; got {module!r}"
                    f"{did_you_mean(module, MODULES)}"
                )
