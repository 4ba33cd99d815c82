"""The planner's closed forms are what the model does: every step of the real model, traced on fake tensors in a fake
world, has the bytes, products and collectives that `plan/costs.py` says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megackpt.cli.main import main
from megackpt.config.run import RunConfig
from megackpt.plan.profile import Profile
from megackpt.plan.steps import BLOCK_NAMES
from megackpt.recompute.stepwise import observe_steps
from megackpt.train.traced import Difference, closed_profile, compare, differences, traced_profile
from tests.layouts import FAMILIES, Flags
from tests.recompute.models import Subject, shape

VOCAB = 509  # padded: the last rank has rows of nothing

# family, tp, sequence parallel, fused, format, dropout
FACTORS = (("gpt", "llama"), ((1, False), (2, False), (2, True), (8, False), (8, True)), (True, False),
           ("fp32", "bf16"), (0.0, 0.1))  # fmt: skip
PRODUCT = list(itertools.product(*FACTORS))
Case = tuple[str, tuple[int, bool], bool, str, float]


def pairs_of(case: Case) -> set[object]:
    return set(itertools.combinations(enumerate(case), 2))


def few() -> list[Case]:
    """As few cases as meet every pair of values of two factors."""
    chosen: list[Case] = []
    missing = set().union(*map(pairs_of, PRODUCT))
    while missing:
        chosen.append(max(PRODUCT, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


PAIRS = few()


def config_of(case: Case, **more: object) -> RunConfig:
    family, (tp, sp), fused, dtype, dropout = case
    flags: Flags = FAMILIES[family] | {
        "params-dtype": dtype, "attention-backend": "fused" if fused else "unfused", "hidden-dropout": dropout,
        "attention-dropout": dropout, "tensor-model-parallel-size": tp, "sequence-parallel": sp,
    } | {name.replace("_", "-"): value for name, value in more.items()}  # fmt: skip
    if family == "llama" and tp == 8:
        flags = flags | {"num-query-groups": 8}
    return RunConfig.from_flags(flags, tp)


def check(config: RunConfig, *ranks: int) -> None:
    for rank in ranks:
        traced = traced_profile(config, VOCAB, rank)
        assert differences(closed_profile(config, VOCAB, rank), traced) == []


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_closed_forms_are_what_the_model_does(case: Case) -> None:
    config = config_of(case)
    check(config, config.parallel.world_size - 1)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in PRODUCT if c not in PAIRS], ids=str)
def test_closed_forms_are_what_the_model_does_everywhere(case: Case) -> None:
    config = config_of(case)
    check(config, *sorted({0, config.parallel.world_size - 1}))


@pytest.mark.parametrize("chunk", [40, 16, 7])
def test_loss_in_parts(chunk: int) -> None:
    check(config_of(("gpt", (2, True), True, "fp32", 0.0), loss_chunk_size=chunk), 0, 1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt", {"disable_bias_linear": True}),
        ("gpt", {"num_query_groups": 2, "group_query_attention": True}),
        ("gpt", {"untie_embeddings_and_output_weights": True, "kv_channels": 16}),
        ("llama", {"disable_bias_linear": False}),
        ("llama", {"rotary_percent": 0.5, "swiglu": False, "squared_relu": True}),
        ("llama", {"num_query_groups": 8}),
        ("llama", {"qk_layernorm": True}),
        ("gpt", {"qk_layernorm": True, "num_query_groups": 2, "group_query_attention": True}),
    ],
)
def test_shapes_between_the_families(family: str, changes: dict[str, object]) -> None:
    check(config_of((family, (2, False), False, "bf16", 0.1), **changes), 1)
    check(config_of((family, (1, False), True, "fp32", 0.0), **changes), 0)


def test_any_rank_of_a_world_that_does_not_exist() -> None:
    """Rank 2,990 of 3,072, with 175B's widths: nothing is allocated, nobody is met."""
    flags: Flags = {
        "num-layers": 128, "hidden-size": 12288, "num-attention-heads": 96, "seq-length": 2048, "vocab-size": 51200,
        "max-position-embeddings": 2048, "micro-batch-size": 1, "global-batch-size": 3072, "params-dtype": "bf16",
        "tensor-model-parallel-size": 8, "pipeline-model-parallel-size": 64, "sequence-parallel": True, "lr": 1e-4,
        "train-iters": 1, "mock-data": True,
    }  # fmt: skip
    config = RunConfig.from_flags(flags, 3072)
    traced = traced_profile(config, 51200, 2990)
    assert differences(closed_profile(config, 51200, 2990), traced) == []
    assert traced.boundary_bytes == 2 * 2048 * 12288 // 8
    assert not dist.is_initialized()


def test_a_wrong_figure_is_named() -> None:
    config = config_of(("gpt", (2, True), True, "fp32", 0.0))
    closed, traced = closed_profile(config, VOCAB, 0), traced_profile(config, VOCAB, 0)
    steps = [replace(s, internal_bytes=7) if s.name == "mlp.act" else s for s in closed.block.steps]
    wrong = Profile(closed.embedding, replace(closed.block, steps=tuple(steps)), closed.head)
    assert differences(wrong, traced) == [Difference("block", "mlp.act", "internal_bytes", 7, 0)]
    assert str(differences(wrong, traced)[0]) == "block mlp.act: internal_bytes 7 in closed form, 0 in the model"
    assert "agrees with the closed forms" in compare(config, VOCAB, 1)


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --num-layers 4 --hidden-size 96 --num-attention-heads 8 --seq-length 40 --vocab-size 509"
    line += " --micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 2 --world-size 4"
    assert main([*line.split(), "--traced", "3"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Traced: the model of rank 3, traced on fake tensors") and "of all 17 steps" in said
    with pytest.raises(SystemExit) as refused:
        main([*line.split(), "--traced", "4"])
    assert refused.value.code == 2
    assert "--traced 4: the run has 4 ranks, 0 to 3." in capsys.readouterr().err


def test_real_tensors_show_the_same_as_fake_ones() -> None:
    """And the observer leaves the model's own numbers alone: the loss is that of a plain forward."""
    subject = Subject(shape("llama", num_layers=1, fused_attention=False, attention_dropout=0.1))
    subject.reset()
    plain = subject.chunk(subject.tokens, subject.labels).detach()
    subject.reset()
    losses = []
    steps = observe_steps(lambda: losses.append(subject.chunk(subject.tokens, subject.labels)))
    assert torch.equal(losses[0], plain)
    assert [s.name for s in steps if s.address == "layers.0"] == [
        name for name in BLOCK_NAMES if name.split(".")[1] not in ("gather", "reduce", "qknorm")
    ]
    core = next(s for s in steps if s.name == "attn.core")
    scores = 3 * 6 * 20 * 20  # b a s s
    assert (core.internal_bytes, core.mask_bytes) == (2 * 4 * scores, scores)
    assert core.forward.flops == 2 * 2 * scores * 8 and core.backward.flops == 2 * core.forward.flops
