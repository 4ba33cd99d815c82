"""What backward does again under each policy: products, collectives, steps; counted by wrapping torch.

Products of one layer's forward, W = 2mkn FLOPs each (design table, general form; q = heads x head size, k = kv heads x
head size, g = 2 in a gated MLP):

    qkv   [sb, h] x [h, q+2k]    up    [sb, h] x [h, g·f]     core  two of [s, d] x [d, s] per head, 4s²bq in all
    proj  [sb, q] x [q, h]       down  [sb, f] x [f, h]

Backward runs each twice (input and weight gradient).  A policy adds, per layer,

    none, free, layernorm   nothing            full, boundaries       qkv, core, up
    core_attn               core               full, layer-input      qkv, core, proj, up
    mlp (or mlp.up)         up                 uniform k              every product of every layer in the group but
                                                                      the last layer's down
A consumer (proj, down) is never replayed while the boundary behind it is kept: nothing that was saved depends on it.

Collectives of one layer, bytes of the whole tensor G = e·s·b·h.  Under sequence parallelism the forward gathers before
qkv and up and reduce-scatters after proj and down; the backward of each is the other kind; and the two gathers are
replayed for the weight gradients (and for a replayed product at the same time): 6 gathers and 4 reduce-scatters, for
none and for boundary-full alike.  Without it: an all-reduce after proj and down, and one each for the input gradients
of qkv and up.  On top come the forward reductions that a policy replays: 1 per layer with the layer input alone, 2k-1
per group of k layers.
Ends: the embedding's reduction, the gather (or input gradient) of the head, and two small all-reduces of the loss
(maximum [s, b]; sum of exponentials and target logit [2, s, b], fp32).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from megackpt.config.model import ModelConfig
from megackpt.plan import ChunkPlan, Decision, Group, SaveSet, chunk_plan
from megackpt.plan.demand import replayed_by_layer, replayed_steps
from megackpt.plan.flops import ModelShape, layer_forward, replay_share
from megackpt.plan.steps import BLOCK_NAMES
from tests.pool import run_distributed
from tests.recompute.models import POLICIES, VOCAB, B, L, S, Subject, plan_of, shape
from tests.recompute.probes import Product, Products, Recorder, flops
from tests.tensor.probes import collectives, world_axis

REPLAYED_PRODUCTS = {
    "none": (),
    "free": (),
    "core": ("core",),
    "norms": (),
    "mlp": ("up",),
    "modules": ("core", "up"),
    "up": ("up",),
    "full": ("qkv", "core", "up"),
    "full-input": ("qkv", "core", "proj", "up"),
}


def replayed_products(policy: str) -> list[tuple[str, ...]]:
    """Per layer."""
    every = ("qkv", "core", "proj", "up", "down")
    if policy.startswith("uniform"):
        k = POLICIES[policy]["num_layers"]
        return [every[:-1] if place % k == k - 1 or place == L - 1 else every for place in range(L)]
    if policy.startswith("block"):
        whole = REPLAYED_PRODUCTS["full-input" if policy.endswith("input") else "full"]
        return [whole if place < POLICIES[policy]["num_layers"] else () for place in range(L)]
    return [REPLAYED_PRODUCTS[policy]] * L


def replayed_reductions(policy: str) -> int:
    """Of all layers: 1 for each that keeps its input alone, 2k-1 for a group of k."""
    if policy.startswith("uniform"):
        k = POLICIES[policy]["num_layers"]
        return sum(2 * min(k, L - first) - 1 for first in range(0, L, k))
    return {"full-input": L, "block-3-input": 3}.get(policy, 0)


@dataclass(frozen=True)
class Case:
    family: str
    fused: bool
    dropout: float = 0.0
    sequence_parallel: bool = False
    t: int = 1

    def __str__(self) -> str:
        words = [self.family, "fused" if self.fused else "unfused", "dropout" if self.dropout else "no-dropout"]
        return "-".join(words + ([f"tp{self.t}"] if self.t > 1 else []) + (["sp"] if self.sequence_parallel else []))

    @property
    def config(self) -> ModelConfig:
        changes: dict[str, Any] = {"fused_attention": self.fused, "hidden_dropout": self.dropout}
        if not self.fused:
            changes["attention_dropout"] = self.dropout
        if self.family == "llama" and self.t > 1:
            changes["num_query_groups"] = 2
        return shape(self.family, **changes)

    def product(self, name: str) -> Counter[Product]:
        c, t = self.config, self.t
        d, q, k = 8, 6 * 8 // t, c.num_query_groups * 8 // t
        gated = 2 if c.gated else 1
        if name == "core":
            if self.fused:
                return Counter({("sdpa", (B, 6 // t, S, d)): 1})
            groups = c.num_query_groups // t
            rows = 6 // c.num_query_groups * S
            return Counter({("bmm", (B * groups, rows, d, S)): 1}) + Counter({("bmm", (B * groups, rows, S, d)): 1})
        m, inner, n = {
            "qkv": (S * B, c.hidden_size, q + 2 * k),
            "proj": (S * B, q, c.hidden_size),
            "up": (S * B, c.hidden_size, gated * c.ffn_hidden_size // t),
            "down": (S * B, c.ffn_hidden_size // t, c.hidden_size),
        }[name]
        return Counter({("mm", (m, inner, n)): 1})

    def replayed(self, policy: str) -> Counter[Product]:
        total: Counter[Product] = Counter()
        for products in replayed_products(policy):
            for name in products:
                total += self.product(name)
        return total

    def collectives(self, policy: str) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
        """In forward and in backward: (kind, bytes of the whole tensor)."""
        if self.t == 1:
            return Counter(), Counter()
        whole = 4 * S * B * self.config.hidden_size
        again = replayed_reductions(policy)
        loss = Counter({("all_reduce", 4 * S * B): 1, ("all_reduce", 2 * 4 * S * B): 1})
        if not self.sequence_parallel:
            forward = Counter({("all_reduce", whole): 1 + 2 * L})  # embedding, layers
            backward = Counter({("all_reduce", whole): 1 + 2 * L + again})  # head, layers
            return forward + loss, backward
        gather, scatter = ("all_gather_into_tensor", whole), ("reduce_scatter_tensor", whole)
        forward = Counter({gather: 2 * L + 1, scatter: 2 * L + 1})  # + 1: head; embedding
        # gathers: backward of the reduce-scatters, of the embedding's too, and the replayed ones, of the head too
        backward = Counter({gather: (2 * L + 1) + (2 * L + 1), scatter: 2 * L + 1 + again})
        return forward + loss, backward


@dataclass(frozen=True)
class Found:
    forward: Counter[Product]
    backward: Counter[Product]
    sent_forward: list[tuple[str, int]]
    sent_backward: list[tuple[str, int]]


def measure(subject: Subject) -> dict[str | None, Found]:
    """By policy; None is plain autograd without a tape."""
    found: dict[str | None, Found] = {}
    for policy in (None, *POLICIES):
        subject.reset()
        with collectives() as sent, Products() as forward:
            loss, _ = subject.forward(None if policy is None else plan_of(policy))
        with collectives() as sent_back, Products() as backward:
            loss.backward()
        found[policy] = Found(forward.seen, backward.seen, list(sent), list(sent_back))
    return found


def check(case: Case, found: dict[str | None, Found]) -> None:
    plain = found[None]
    for name in ("qkv", "core", "proj", "up", "down"):
        assert case.product(name) <= plain.forward  # the table of this file names products that really run
    for policy in POLICIES:
        one = found[policy]
        assert one.forward == plain.forward, policy
        extra = Counter(one.backward)
        extra.subtract(plain.backward)
        assert +extra == case.replayed(policy) and not -extra, f"{policy}: {extra - case.replayed(policy)}"
        forward, backward = case.collectives(policy)
        assert Counter(one.sent_forward) == forward, policy
        assert Counter(one.sent_backward) == backward, policy
    if case.sequence_parallel:
        # Plain autograd keeps what was gathered: its backward gathers once per reduce-scatter and no more.
        gathers = Counter(kind for kind, _ in plain.sent_backward)["all_gather_into_tensor"]
        assert gathers == 2 * L + 1


CASES = [
    Case("gpt", fused=True),
    Case("gpt", fused=False, dropout=0.1),
    Case("llama", fused=True, dropout=0.1),
    Case("llama", fused=False),
]
SPREAD = [
    Case("gpt", fused=False, dropout=0.1, sequence_parallel=True, t=2),
    Case("gpt", fused=True, t=2),
    Case("llama", fused=True, sequence_parallel=True, t=2),
    Case("llama", fused=False, dropout=0.1, t=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_of_every_policy(case: Case) -> None:
    check(case, measure(Subject(case.config)))


def _measure_rank(rank: int, world_size: int, case: Case) -> dict[str | None, Found]:
    return measure(Subject(case.config, world_axis(rank, world_size), case.sequence_parallel))


@pytest.mark.parametrize("case", SPREAD, ids=str)
def test_products_and_collectives_on_two_ranks(case: Case) -> None:
    ranks = run_distributed(_measure_rank, 2, case, timeout=60)
    for found in ranks:
        check(case, found)
    for policy in POLICIES:  # the same order on both, or they would wait for each other
        a, b = (found[policy] for found in ranks)
        assert (a.sent_forward, a.sent_backward) == (b.sent_forward, b.sent_backward)


def test_six_gathers_and_four_scatters_per_layer() -> None:
    """The design's numbers, from the formula that the measured ones equal."""
    case = Case("gpt", fused=True, sequence_parallel=True, t=2)
    for policy, scatters in (("none", 4 * L), ("full", 4 * L), ("full-input", 5 * L), ("uniform-2", 4 * L + 3 + 3 + 1)):
        total: Counter[str] = Counter()
        for counter in case.collectives(policy):
            for (kind, _), count in counter.items():
                total[kind] += count
        ends_gathers, ends_scatters = 3, 2  # head forward, its replay, the embedding's backward; their counterparts
        assert total["all_gather_into_tensor"] - ends_gathers == 6 * L
        assert total["reduce_scatter_tensor"] - ends_scatters == scatters


@pytest.mark.parametrize("fused", [True, False])
def test_share_replayed_of_a_gpt_layer(fused: bool) -> None:
    """(14+4s/h)/(72+12s/h), (16+4s/h)/(72+12s/h), (24k-8+4ks/h)/(k(72+12s/h)), measured, for f = 4h and full groups."""
    layers, s, h = 6, S, 48
    config = shape("gpt", num_layers=layers, ffn_hidden_size=4 * h, fused_attention=fused)
    subject = Subject(config)

    def backward(policy: dict[str, Any] | None) -> int:
        from_policy = None if policy is None else chunk_plan(range(layers), **policy)
        subject.reset()
        loss, _ = subject.forward(from_policy)
        with Products() as products:
            loss.backward()
        return flops(products.seen)

    plain = backward(None)
    forward = Fraction(2 * S * B * h * (12 * h + 2 * s))  # 24 s b h² + 4 s² b h
    whole = 72 + Fraction(12 * s, h)
    for policy, wanted in (
        ({"granularity": "none"}, Fraction(0)),
        ({"granularity": "free"}, Fraction(0)),
        ({"granularity": "full"}, (14 + Fraction(4 * s, h)) / whole),
        ({"granularity": "full", "keep": "layer-input"}, (16 + Fraction(4 * s, h)) / whole),
        ({"granularity": "full", "num_layers": 2}, (24 * 2 - 8 + Fraction(4 * 2 * s, h)) / (2 * whole)),
        ({"granularity": "full", "num_layers": 3}, (24 * 3 - 8 + Fraction(4 * 3 * s, h)) / (3 * whole)),
    ):
        assert (backward(policy) - plain) / (3 * layers * forward) == wanted, policy




@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_predicted_share_is_the_measured_one(family: str) -> None:
    """`plan.demand` and `plan.flops` price every policy as the engine runs it, grouped queries and gates included."""
    config = shape(family, fused_attention=False)
    model = ModelShape(
        layers=L, hidden=48, heads=6, kv_heads=config.num_query_groups, head_size=8, ffn=168, gated=config.gated,
        seq=S, padded_vocab=config.padded_vocab_size(VOCAB, 1), causal=False,
    )  # fmt: skip
    found = measure(Subject(config))
    absent = {"attn.gather", "mlp.gather", "attn.reduce", "mlp.reduce", "attn.qknorm"}
    absent |= {"attn.rope"} if family == "gpt" else set()
    for policy in POLICIES:
        measured = flops(found[policy].backward) - flops(found[None].backward)
        predicted = replay_share(model, replayed_by_layer(plan_of(policy), range(L), absent))
        assert measured == round(predicted * 3 * L * layer_forward(model, B).total), policy


# -- steps -----------------------------------------------------------------------------------------------------------


def replayed_by(subject: Subject, plan: ChunkPlan) -> list[list[str]]:
    """Names of the steps of each layer that one backward replays."""
    subject.reset()
    recorders = []
    for block in subject.chunk.layers.values():
        block.step = Recorder(getattr(block.step, "scope", block.step))
        recorders.append(block.step)
    loss, _ = subject.forward(plan)
    assert all(len(set(r.forward)) == len(r.forward) and not r.replayed for r in recorders)
    loss.backward()
    return [r.replayed for r in recorders]


def _steps_replayed(rank: int, world_size: int, case: Case) -> dict[str, list[list[str]]]:
    subject = Subject(case.config, world_axis(rank, world_size), case.sequence_parallel)
    return {policy: replayed_by(subject, plan_of(policy)) for policy in POLICIES}


def check_steps(case: Case, found: dict[str, list[list[str]]]) -> None:
    absent = {"attn.qknorm"} | ({"attn.rope"} if case.family == "gpt" else set())
    absent |= set() if case.sequence_parallel else {"attn.gather", "mlp.gather"}
    absent |= set() if case.t > 1 else {"attn.reduce", "mlp.reduce"}
    for policy in POLICIES:
        wanted = replayed_by_layer(plan_of(policy), range(L), absent)
        for place, (names, steps) in enumerate(zip(found[policy], wanted, strict=True)):
            assert sorted(names) == sorted(steps), f"{policy}, layer {place}"  # each once, and no other


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_that_run_again_are_those_predicted(case: Case) -> None:
    check_steps(case, _steps_replayed(0, 1, case))


@pytest.mark.parametrize("case", [SPREAD[0], SPREAD[3]], ids=str)
def test_steps_on_two_ranks(case: Case) -> None:
    for found in run_distributed(_steps_replayed, 2, case, timeout=60):
        check_steps(case, found)


def random_save_set(rng: random.Random) -> SaveSet:
    """Any decisions for the steps of a layer; masks are redrawn, and the layer's output stays (it is another layer's
    input, which one layer's save-set does not decide about)."""
    choices = ("keep", "replay")
    decisions = {n: Decision(rng.choice(choices), rng.choice(choices), "replay") for n in BLOCK_NAMES}
    decisions["mlp.residual"] = Decision("keep", rng.choice(choices), "replay")
    return SaveSet(decisions)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_steps_of_random_save_sets(family: str) -> None:
    rng = random.Random(3)
    subject = Subject(shape(family, fused_attention=False, hidden_dropout=0.1, attention_dropout=0.1))
    absent = {"attn.gather", "mlp.gather", "attn.reduce", "mlp.reduce", "attn.qknorm"}
    absent |= {"attn.rope"} if family == "gpt" else set()
    for _ in range(8):
        sets = [random_save_set(rng) for _ in range(L)]
        found = replayed_by(subject, ChunkPlan({f"layers.{i}": s for i, s in enumerate(sets)}))
        for names, save_set in zip(found, sets, strict=True):
            assert sorted(names) == sorted(replayed_steps(save_set, absent)), save_set


def random_tree(rng: random.Random, first: int, last: int, depth: int) -> tuple[Group, ...]:
    """Groups of neighbours in `first` to `last`, with and without an inside."""
    groups: list[Group] = []
    while first <= last:
        end = rng.randint(first, last)
        if rng.random() < 0.7:
            inside = random_tree(rng, first, end, depth - 1) if depth and rng.random() < 0.5 else None
            groups.append(Group(first, end, inside))
        first = end + 1
    return tuple(groups)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_steps_of_trees_of_groups(family: str) -> None:
    """How often each step runs again, groups in groups over random save-sets: what the logged overhead is made of."""
    rng = random.Random(4)
    subject = Subject(shape(family, fused_attention=False))
    absent = {"attn.gather", "mlp.gather", "attn.reduce", "mlp.reduce", "attn.qknorm"}
    absent |= {"attn.rope"} if family == "gpt" else set()
    for _ in range(12):
        sets = {f"layers.{i}": random_save_set(rng) for i in range(L)}
        plan = ChunkPlan(sets, random_tree(rng, 0, L - 1, 3))
        for names, steps in zip(replayed_by(subject, plan), replayed_by_layer(plan, range(L), absent), strict=True):
            assert Counter(names) == Counter(steps), plan.groups


def test_a_fused_core_whose_log_sum_exp_is_kept_is_not_replayed() -> None:
    subject = Subject(shape("gpt", fused_attention=True))
    save_set = SaveSet({"attn.core": Decision(output="replay")})
    plan = ChunkPlan({f"layers.{i}": save_set for i in range(L)})
    assert replayed_by(subject, plan) == [[]] * L == [list(replayed_steps(save_set, (), {"attn.core"}))] * L
