"""What to keep and what to replay, per stage and chunk, so that a step is fastest within a memory budget.

Read in this order::

    prices    what a save-set of one layer costs: bytes kept, bytes rebuilt at once, seconds replayed
    pareto    all sensible save-sets of a layer, pruned to the few that nobody beats      -> Item
    knapsack  the best mixture of items for any number of layers and any budget, exact    -> Fronts, Table
    problem   a training step in numbers: layers, stages, ends, state, schedule, budget   -> Problem
    stage     the best mixture for one stage: several chunks, slots, host offload
    split     how many layers each stage gets
    flags     the best that one policy for all stages can do (Megatron's flags, mixtures of two sets)
    ahead     which stages rebuild while a gradient is on its way
    choose    all of it, simulated                                                        -> Choice

The idea: under 1F1B the first stage holds p micro-batches and the last one, and the slowest stage sets the pace, so
one policy for all stages replays on stages that have room.  Stages do not share memory, so each can be solved
alone and exactly: a multiple-choice knapsack (one item per layer, bytes against seconds).  AdaPipe (ASPLOS'24) and
Lynx (arXiv 2406.08756) plan per stage too.

Everything is whole numbers (bytes, picoseconds) and sorted, so that the same numbers give the same plan everywhere.
"""
