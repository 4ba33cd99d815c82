"""Any plan at all gives the same bits: random decisions per step, random trees of groups, random tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from megackpt.config.model import ModelConfig
from megackpt.plan import ChunkPlan, Decision, Group, Plan, SaveSet
from megackpt.plan.steps import BLOCK_NAMES, EMBED, HEAD
from megackpt.recompute import Tape
from megackpt.recompute.tiers import HostTier
from tests.pool import run_distributed
from tests.recompute.models import Outcome, Subject, shape
from tests.tensor.probes import world_axis

LAYERS = 4
PLACES = {"embedding": [s.name for s in EMBED], "head": [s.name for s in HEAD]}
PLACES |= {f"layers.{i}": list(BLOCK_NAMES) for i in range(LAYERS)}


def random_groups(rng: random.Random, first: int, last: int, depth: int = 0) -> tuple[Group, ...]:
    """Disjoint groups within a range of layers, with groups in them."""
    groups, place = [], first
    while place <= last:
        end = rng.randint(place, last)
        if rng.random() < 0.5:
            inner = None if rng.random() < 0.4 or depth == 2 else random_groups(rng, place, end, depth + 1)
            groups.append(Group(place, end, inner))
        place = end + 1
    return tuple(groups)


def random_plan(rng: random.Random, *, tiers: bool) -> ChunkPlan:
    choices = ["keep", "replay", "offload_host"] if tiers else ["keep", "replay"]
    weights = [rng.random() for _ in choices]  # plans that mostly keep and plans that mostly drop

    def decision() -> Decision:
        output, internals = rng.choices(choices, weights, k=2)
        return Decision(output, internals, rng.choice(("keep", "replay")))

    sets = {address: SaveSet({name: decision() for name in names}) for address, names in PLACES.items()}
    groups = random_groups(rng, 0, LAYERS - 1) if rng.random() < 0.4 else ()
    return ChunkPlan(sets, groups)


def config(number: int, **changes: object) -> ModelConfig:
    """Both families and both cores in turn."""
    family = "llama" if number % 2 else "gpt"
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return shape(family, num_layers=LAYERS, fused_attention=number // 2 % 2 == 0, **dropout, **changes)


@pytest.fixture(scope="module")
def tier() -> Iterator[HostTier]:
    with HostTier() as tier:
        yield tier


def run(subject: Subject, chunk: ChunkPlan, tier: HostTier) -> Outcome:
    subject.reset()
    with Tape(chunk, subject.ledger, tiers={"offload_host": tier}):
        losses = subject.chunk(subject.tokens, subject.labels)
    loss = losses.sum()
    del losses
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in subject.chunk.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, subject.ledger.state_dict(), torch.get_rng_state())


def check(subject: Subject, seed: int, count: int, tier: HostTier) -> None:
    plain = subject.run(None)
    rng = random.Random(seed)
    for number in range(count):
        chunk = random_plan(rng, tiers=number % 3 == 0)
        found = run(subject, chunk, tier)
        wrong = found.differences(plain)
        assert not wrong, f"plan {number} of seed {seed} changes {wrong}:\n{Plan(((chunk,),)).dumps()}"


@pytest.mark.parametrize("number", range(4))
def test_random_plans(number: int, tier: HostTier) -> None:
    check(Subject(config(number, seq_length=12, max_position_embeddings=12)), number, 38, tier)


@pytest.mark.parametrize("number", range(4))
def test_random_plans_in_bf16(number: int, tier: HostTier) -> None:
    changes = {"hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 112}
    subject = Subject(config(number, seq_length=12, max_position_embeddings=12, **changes), dtype=torch.bfloat16)
    check(subject, 100 + number, 5, tier)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_more_random_plans(seed: int, tier: HostTier) -> None:
    check(Subject(config(seed)), 1000 + seed, 40, tier)


def _random_plans_of_rank(rank: int, world_size: int, seed: int, count: int) -> list[tuple[int, list[str]]]:
    """Interleaved micro-batches (F0 F1 B0 F2 B1 B2) under random plans, the same on both ranks: nobody waits for ever,
    and every bit is that of plain autograd."""
    changes = {"num_query_groups": 2} if seed % 2 else {}
    subject = Subject(config(seed, **changes), world_axis(rank, world_size), sequence_parallel=seed % 4 < 2)
    with HostTier() as tier:

        def step(chunk: ChunkPlan | None) -> list[Outcome]:
            subject.reset()
            flights, outcomes = [], []
            for number in range(4):
                if number < 3:
                    if chunk is None:
                        losses = subject.chunk(subject.tokens, subject.labels)
                    else:
                        with Tape(chunk, subject.ledger, tiers={"offload_host": tier}):
                            losses = subject.chunk(subject.tokens, subject.labels)
                    flights.append(losses.sum())
                    del losses
                if number > 0:
                    loss = flights[number - 1]
                    loss.backward()
                    grads = {n: p.grad.clone() for n, p in subject.chunk.named_parameters() if p.grad is not None}
                    outcomes.append(
                        Outcome(loss.detach(), grads, subject.ledger.state_dict(), torch.get_rng_state())
                    )
            return outcomes

        plain, rng, wrong = step(None), random.Random(seed), []
        for number in range(count):
            found = step(random_plan(rng, tiers=number % 3 == 0))
            differences = [d for a, b in zip(found, plain, strict=True) for d in a.differences(b)]
            if differences:
                wrong.append((number, differences))
    return wrong


@pytest.mark.parametrize("seed", [0, 3])
def test_random_plans_on_two_ranks(seed: int) -> None:
    assert run_distributed(_random_plans_of_rank, 2, seed, 4, timeout=60) == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10, 18))
def test_more_random_plans_on_two_ranks(seed: int) -> None:
    assert run_distributed(_random_plans_of_rank, 2, seed, 20, timeout=110) == [[], []]
