"""Gradients of a step from accumulation to update: buffer, reduction, norm, update, learning rate.

In the order of a step (each line is one function or method of this room)::

    reduction.start(micro_batches)
    ...forward and backward of n micro-batches; the buffer is the model's gradient sink...
    reduction.finish(scale=1 / tokens)
    statistics = gradient_statistics(buffer, mesh)
    clip_(buffer, statistics.norm, max_norm)
    rates = learning_rate(consumed_samples)
    optimizer.step(rates.rate, rates.decoupled)
"""

from megackpt.optim.buffer import GradientBuffer
from megackpt.optim.lr_schedule import LearningRate, Rates
from megackpt.optim.master import MasterOptimizer
from megackpt.optim.norm import GradientStatistics, clip_, clip_coefficient, gradient_statistics, params_norm
from megackpt.optim.reduction import GradientReduction
from megackpt.optim.update import Update

__all__ = [
    "GradientBuffer",
    "GradientReduction",
    "GradientStatistics",
    "LearningRate",
    "MasterOptimizer",
    "Rates",
    "Update",
    "clip_",
    "clip_coefficient",
    "gradient_statistics",
    "params_norm",
]
