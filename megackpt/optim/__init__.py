"""Gradients of a step from accumulation to update: buffer, reduction, norm, update, learning rate.

In the order of a step (each line is one function or method of this room)::

    buffer.zero_()
    ...forward and backward of n micro-batches; the buffer is the model's gradient sink...
    finish(buffer, mesh, sequence_parallel=..., scale=1 / tokens)
    statistics = gradient_statistics(buffer, mesh)
    clip_(buffer, statistics.norm, max_norm)
    rates = learning_rate(consumed_samples)
    optimizer.step(rates.rate, rates.decoupled)
"""

from megackpt.optim.buffer import GradientBuffer
from megackpt.optim.finalize import finish
from megackpt.optim.lr_schedule import LearningRate, Rates
from megackpt.optim.master import MasterOptimizer
from megackpt.optim.norm import GradientStatistics, clip_, clip_coefficient, gradient_statistics, params_norm
from megackpt.optim.update import Update

__all__ = [
    "GradientBuffer",
    "GradientStatistics",
    "LearningRate",
    "MasterOptimizer",
    "Rates",
    "Update",
    "clip_",
    "clip_coefficient",
    "finish",
    "gradient_statistics",
    "params_norm",
]
