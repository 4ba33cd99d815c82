"""The loss scale: how far gradients are lifted so that fp16 can hold them.

fp16 has no number between 0 and 6e-8, and gradients of activations are often smaller.  So backward starts from the
loss times a scale, and the finished fp32 gradients are divided by it.  A scale that is too large shows as inf or NaN
in the gradients; the step is then left out.  The dynamic rule is Megatron's::

    overflow       the window starts anew; one of `hysteresis` chances is used; when none is left, halve (not below
                   `minimum`)
    no overflow    after `window` such steps in a row: double, and all chances are back

Chances come back with a doubling only, so after the first halving every further overflow halves at once.  Other
formats have a static scale, 1 unless `--loss-scale` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from megackpt.config.precision import PrecisionConfig

_LARGEST = 2.0**120  # gradients that are all zero never overflow: the scale must stay an fp32 number


class LossScaler:
    """The scale of the next step.  All ranks tell it the same, so it is the same on all of them.

    Attributes:
        scale: what the loss is multiplied with.
        good_steps: steps since the last overflow or doubling.
        chances: overflows that do not halve the scale yet.
    """

    def __init__(
        self,
        scale: float = 1.0,
        *,
        dynamic: bool = False,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        self.scale = scale
        self.dynamic, self.minimum, self.window, self.hysteresis = dynamic, minimum, window, hysteresis
        self.good_steps = 0
        self.chances = hysteresis

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> LossScaler:
        """Dynamic for fp16 without a static `--loss-scale`."""
        if not config.dynamic_loss_scale:
            return cls(config.loss_scale or 1.0)
        return cls(
            config.initial_loss_scale,
            dynamic=True,
            minimum=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may still be cured by a smaller scale."""
        return self.dynamic and self.scale > self.minimum

    def update(self, overflow: bool) -> None:
        """Learn whether the step that used `scale` had a gradient that is not finite."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.chances -= 1
            if self.chances <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps = 0
            self.chances = self.hysteresis
            self.scale = min(self.scale * 2, _LARGEST)

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint keeps."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "good_steps": self.good_steps,
            "chances": self.chances,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on where `state_dict` was taken, if both that run and this one have a dynamic scale.

        A window or hysteresis that has become shorter meanwhile, or a higher minimum, applies from the next step on.
        """
        if not (self.dynamic and state["dynamic"]):
            return
        self.scale = max(float(state["scale"]), self.minimum)
        self.good_steps = min(int(state["good_steps"]), self.window - 1)
        self.chances = min(int(state["chances"]), self.hysteresis)
