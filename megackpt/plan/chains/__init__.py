"""Chain planners: which stages of a chain to keep, and how to replay the others, as trees of two moves.

==================  ==================================================================================================
``types``           stages, chains, plans; groups for the engine, JSON, text
``machine``         runs any plan action by action, refuses what is impossible, counts bytes and executions
``uniform``         equal groups, and the best number of them
``binomial``        least extra work for equal stages and a number of slots
``two_level``       the same with slots on a slower tier
``heterogeneous``   least extra work for unequal stages and a byte budget; ``least`` the least budget
``graph``           module graphs cut at their joints; ``graph_planner`` plans them
==================  ==================================================================================================
"""

from megackpt.plan.chains.binomial import beta, binomial, extra_advances
from megackpt.plan.chains.graph import GraphPlan, GraphReport, ModuleGraph, Node, run_graph
from megackpt.plan.chains.graph_planner import plan_graph
from megackpt.plan.chains.heterogeneous import heterogeneous
from megackpt.plan.chains.least import least_budget
from megackpt.plan.chains.machine import Action, MachineError, Report, execute, run, schedule
from megackpt.plan.chains.two_level import two_level
from megackpt.plan.chains.types import Chain, ChainPlan, Drop, InfeasibleBudget, Keep, Stage
from megackpt.plan.chains.uniform import UniformGroups, uniform, uniform_bytes, uniform_plan

__all__ = [
    "Action", "Chain", "ChainPlan", "Drop", "GraphPlan", "GraphReport", "InfeasibleBudget", "Keep", "MachineError",
    "ModuleGraph", "Node", "Report", "Stage", "UniformGroups", "beta", "binomial", "execute", "extra_advances",
    "heterogeneous", "least_budget", "plan_graph", "run", "run_graph", "schedule", "two_level", "uniform",
    "uniform_bytes", "uniform_plan",
]  # fmt: skip
