"""The profile as data: closed forms, JSON, parameter counts."""

from __future__ import annotations

import json

import pytest

from megackpt.plan.flops import ModelShape, layer_forward, logits_forward
from megackpt.plan.numbers import Layout, ModelNumbers
from megackpt.plan.parameters import layer_parameters, parameters, stage_parameters, state_bytes
from megackpt.plan.profile import LayerProfile, Profile, StepCost, profile
from megackpt.plan.steps import BLOCK_NAMES

GPT = ModelNumbers.gpt(8, 256, 8, 1024, 128, fused_attention=False, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = ModelNumbers(
    8, 256, 8, 4, 32, 704, 1000, 1024, 128,
    norm="RMSNorm", positions="rope", biases=False, tied=False, activation="swiglu",
)  # fmt: skip


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_json_and_back(model):
    layout = Layout.of_counts([[1, 2], [2, 3]], t=2, n=4, micro_batch=2, sequence_parallel=True)
    made = profile(model, layout)
    assert Profile.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert ModelNumbers.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    with pytest.raises(ValueError, match="version 2"):
        Profile.from_json({"version": 2})


def test_only_the_steps_that_exist():
    plain = profile(GPT, Layout.even(8))
    assert plain.block.names == tuple(
        n for n in BLOCK_NAMES if n.split(".")[1] not in ("gather", "reduce", "rope", "qknorm")
    )
    split = profile(LLAMA, Layout.even(8, t=2, sequence_parallel=True))
    assert set(BLOCK_NAMES) - set(split.block.names) == {"attn.qknorm"}
    assert split.block["attn.core"].reads == ("attn.rope",)
    assert profile(LLAMA, Layout.even(8)).block["attn.qkv"].reads == ("attn.norm",)


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_flops_are_those_of_the_formulas(model, t):
    shape = ModelShape(
        model.layers, model.hidden, model.heads, model.kv_heads, model.head_size, model.ffn, model.padded_vocab,
        model.seq, gated=model.gated,
    )  # fmt: skip
    made = profile(model, Layout.even(8, t=t, micro_batch=2))
    expected = layer_forward(shape, 2)
    for step in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"):
        assert made.block[step].flops * t == expected.of(step)
        assert made.block[step].backward_flops == 2 * made.block[step].flops
    skipped = 2 if model.fused_attention else 1  # a fused kernel leaves the masked half out
    assert made.block["attn.core"].flops * t * skipped == expected.core
    assert made.head["head.logits"].flops * t == logits_forward(shape, 2)


def test_collectives_of_a_layer():
    made = profile(GPT, Layout.even(8, t=2, sequence_parallel=True, micro_batch=2))
    whole = 2 * 128 * 2 * 256
    forward = [(s.collective, s.collective_bytes) for s in made.block.steps if s.collective]
    assert forward == [("all_gather", whole), ("reduce_scatter", whole)] * 2
    assert [s.backward_collective for s in made.block.steps if s.collective] == ["reduce_scatter", "all_gather"] * 2
    plain = profile(GPT, Layout.even(8, t=2, micro_batch=2))
    assert [s.name for s in plain.block.steps if s.collective] == ["attn.reduce", "mlp.reduce"]
    assert [s.name for s in plain.block.steps if s.backward_collective] == ["attn.qkv", "mlp.up"]


def test_context_parallel_divides_the_sequence():
    one, two = (profile(LLAMA, Layout.even(8, c=c)) for c in (1, 2))
    for step in one.block.steps:
        assert two.block[step.name].output_bytes * 2 == step.output_bytes
        assert two.block[step.name].internal_bytes * 2 == step.internal_bytes
    assert two.boundary_bytes * 2 == one.boundary_bytes


@pytest.mark.parametrize(("t", "what"), [(3, "heads 8"), (8, "key/value heads 4")])
def test_what_does_not_divide_is_refused(t, what):
    with pytest.raises(ValueError, match=f"{what} does not divide over {t}"):
        profile(LLAMA, Layout.even(8, t=t))


def test_layouts_hold_every_layer_once_in_order():
    with pytest.raises(ValueError, match="exactly once"):
        Layout(((range(0, 2),), (range(3, 4),)))
    assert Layout.of_counts([[1, 3], [2, 2]]).pieces == ((range(0, 1), range(3, 6)), (range(1, 3), range(6, 8)))


def test_a_step_reads_what_came_before():
    with pytest.raises(ValueError, match="reads later"):
        LayerProfile("block", (StepCost("first", ("later",)), StepCost("later")), 8)


# -- parameters ----------------------------------------------------------------------------------------------------


def test_parameters_of_known_models():
    gpt3 = ModelNumbers.gpt(96, 12288, 96, 51200, 2048)
    assert layer_parameters(gpt3, 1).total == 12 * 12288**2 + 13 * 12288
    llama7b = ModelNumbers(
        32, 4096, 32, 32, 128, 11008, 32000, 32000, 4096,
        norm="RMSNorm", positions="rope", biases=False, tied=False, activation="swiglu",
    )  # fmt: skip
    assert parameters(llama7b, Layout.even(32), 0).total == 6_738_415_616


def test_uneven_split_gives_the_heaviest_stage_its_own_parameters():
    """ME-07: 8 layers as [1, 2, 2, 3]; dividing the model by four is far off."""
    layout = Layout.of_counts([[1], [2], [2], [3]])
    totals = [stage_parameters(LLAMA, layout, stage).total for stage in range(4)]
    layer, matrix = layer_parameters(LLAMA, 1).total, 1024 * 256
    assert totals == [layer + matrix, 2 * layer, 2 * layer, 3 * layer + matrix + 256]
    assert max(totals) > 1.3 * sum(totals) / 4


def test_tied_matrix_is_one_on_one_stage_and_two_on_two():
    matrix = 1024 * 256
    alone = stage_parameters(GPT, Layout.even(8), 0).total
    two = [stage_parameters(GPT, Layout.even(8, 2), stage).total for stage in range(2)]
    assert sum(two) == alone + matrix


def test_state_is_18_bytes_or_6_and_12_over_d():
    assert state_bytes(1000, Layout.even(8)).total == 18_000
    sharded = state_bytes(1000, Layout.even(8, d=4, sharded_optimizer=True))
    assert (sharded.total, sharded.weights, sharded.gradients) == (9_000, 2_000, 4_000)
    assert state_bytes(1000, Layout.even(8, act_bytes=4)).total == 16_000
    assert state_bytes(1000, Layout.even(8, act_bytes=8)).total == 32_000
