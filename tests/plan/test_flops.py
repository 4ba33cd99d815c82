"""FLOP counts against the paper's tables, the policy table of the design, and torch's own FLOP counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megackpt.plan import flops
from megackpt.plan.flops import ModelShape

ROOT = Path(__file__).parents[2]
PAPER = json.loads((ROOT / "tests" / "data" / "paper_flops.json").read_text())

BOUNDARY_FULL = ("qkv", "core", "up")
LAYER_INPUT_FULL = ("qkv", "core", "proj", "up")


def paper_shape(row: dict) -> ModelShape:
    return ModelShape.gpt(row["layers"], row["hidden"], row["heads"], PAPER["padded_vocab"], PAPER["seq"])


def same_in_every_layer(shape: ModelShape, products: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [products] * shape.layers


@pytest.mark.parametrize("row", PAPER["models"], ids=lambda row: row["name"])
def test_paper_mfu(row: dict) -> None:
    used = flops.model_flops(paper_shape(row), row["global_batch"])
    mfu = 100 * flops.utilisation(used, row["selective_s"], row["gpus"], PAPER["peak_flops"])
    assert mfu == pytest.approx(row["formula_mfu_percent"], abs=0.005)
    assert mfu == pytest.approx(row["printed_mfu_percent"], abs=0.2)


@pytest.mark.parametrize("row", PAPER["models"], ids=lambda row: row["name"])
def test_closed_formula(row: dict) -> None:
    shape, batch = paper_shape(row), row["global_batch"]
    s, h, L, V = shape.seq, shape.hidden, shape.layers, shape.padded_vocab
    expected = 72 * batch * L * s * h**2 * (1 + s / (6 * h) + V / (12 * h * L))
    assert flops.model_flops(shape, batch) == pytest.approx(expected, rel=1e-12)
    layer = flops.layer_forward(shape, batch)
    assert layer.total == 24 * batch * s * h**2 + 4 * batch * s**2 * h
    assert (layer.qkv, layer.proj) == (6 * batch * s * h**2, 2 * batch * s * h**2)
    assert (layer.up, layer.down) == (8 * batch * s * h**2, 8 * batch * s * h**2)


def test_shares_of_the_policy_table() -> None:
    shape = paper_shape(PAPER["models"][1])  # 175B
    s, h = shape.seq, shape.hidden
    r = s / h
    boundary = flops.replay_share(shape, same_in_every_layer(shape, BOUNDARY_FULL))
    assert boundary == pytest.approx((14 + 4 * r) / (72 + 12 * r), rel=1e-12)
    assert round(100 * boundary, 1) == 19.8
    layer_input = flops.replay_share(shape, same_in_every_layer(shape, LAYER_INPUT_FULL))
    assert layer_input == pytest.approx((16 + 4 * r) / (72 + 12 * r), rel=1e-12)
    assert round(100 * layer_input, 1) == 22.5
    # Groups of k layers: everything but the last layer's `down`.
    for k in (2, 3, 4):
        group = [flops.PRODUCTS] * (k - 1) + [LAYER_INPUT_FULL]
        share = flops.replay_share(shape, group * (shape.layers // k))
        assert share == pytest.approx((24 * k - 8 + 4 * k * r) / (k * (72 + 12 * r)), rel=1e-12)
    selective = flops.replayed_flops(shape, 1, same_in_every_layer(shape, ("core",)))
    # HFU/MFU of selective recompute is about 1 + s/18h (the head aside).
    assert selective / (3 * shape.layers * flops.layer_forward(shape, 1).total) == pytest.approx(r / 18, rel=0.03)


def test_llama2_7b_boundary_full_is_23_1_percent_plus_core() -> None:
    shape = ModelShape(32, 4096, 32, 32, 128, 11008, 32000, seq=4096, gated=True)
    layer = flops.layer_forward(shape, 1)
    replayed, step = layer.qkv + layer.up, 3 * (layer.total - layer.core)
    assert round(100 * replayed / step, 1) == 23.1
    share = flops.replay_share(shape, same_in_every_layer(shape, BOUNDARY_FULL))
    assert share == pytest.approx((replayed + layer.core) / (3 * layer.total), rel=1e-12)
    assert 0.24 < share < 0.25


def test_full_recompute_moves_hfu_and_not_mfu() -> None:
    shape = ModelShape.gpt(layers=3, hidden=96, heads=8, padded_vocab=512, seq=40)
    everything = same_in_every_layer(shape, flops.PRODUCTS)
    model, hardware = flops.model_flops(shape, 8), flops.hardware_flops(shape, 8, everything)
    head = flops.logits_forward(shape, 8)
    assert model == 3 * flops.model_forward(shape, 8)
    assert hardware - model == flops.model_forward(shape, 8) - head  # at most 4x the forward, head not replayed
    assert flops.hardware_flops(shape, 8, same_in_every_layer(shape, ())) == model


def test_layers_differ_and_step_names_and_repeats_count() -> None:
    shape = ModelShape.gpt(layers=3, hidden=96, heads=8, padded_vocab=512, seq=40)
    layer = flops.layer_forward(shape, 2)
    got = flops.replayed_flops(shape, 2, [("attn.qkv", "mlp.norm", "mlp.up"), (), ("core", "core")])
    assert got == layer.qkv + layer.up + 2 * layer.core


def test_causal_halves_the_core_only() -> None:
    full = flops.layer_forward(ModelShape.gpt(2, 96, 8, 512, 40), 3)
    half = flops.layer_forward(ModelShape.gpt(2, 96, 8, 512, 40, causal=True), 3)
    assert 2 * half.core == full.core
    assert full.total - half.total == half.core
    assert flops.fused_backward_extra(ModelShape.gpt(2, 96, 8, 512, 40), 3) == full.core


def test_errors_name_the_numbers() -> None:
    shape = ModelShape.gpt(3, 96, 8, 512, 40)
    with pytest.raises(ValueError, match="2 layers, the model has 3"):
        flops.replayed_flops(shape, 1, [(), ()])
    with pytest.raises(ValueError, match="'norm'.*qkv, core, proj, up, down"):
        flops.replayed_flops(shape, 1, [("norm",), (), ()])
    with pytest.raises(ValueError, match="kv_heads must be at least 1, got 0"):
        ModelShape(1, 8, 2, 0, 4, 16, 32, 8)
    with pytest.raises(ValueError, match="hidden 97 is not a multiple of heads 8"):
        ModelShape.gpt(3, 97, 8, 512, 40)
    with pytest.raises(ValueError, match="positive"):
        flops.utilisation(1.0, 0.0, 1, 1.0)


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_counts_equal_torchs_counter(kv_heads: int, gated: bool) -> None:
    """A layer and a head written with plain products; head size x heads differs from hidden on purpose."""
    shape = ModelShape(1, 20, 6, kv_heads, 4, 28, 33, seq=12, gated=gated)
    b, s, h, a, d = 2, shape.seq, shape.hidden, shape.heads, shape.head_size
    branches = 2 if gated else 1
    sizes = [(a + 2 * kv_heads) * d, a * d, shape.ffn * branches, shape.ffn, shape.padded_vocab]
    inputs = [h, a * d, h, shape.ffn, h]
    out_of = [sizes[0], h, sizes[2], h, sizes[4]]
    qkv_w, proj_w, up_w, down_w, head_w = (
        torch.randn(o, i, requires_grad=True) for o, i in zip(out_of, inputs, strict=True)
    )
    x = torch.randn(b, s, h, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = F.linear(x, qkv_w).split([a * d, kv_heads * d, kv_heads * d], dim=-1)
        q, k, v = (z.view(b, s, -1, d).transpose(1, 2) for z in (q, k, v))
        k, v = (z.repeat_interleave(a // kv_heads, dim=1) for z in (k, v))
        context = (torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v).transpose(1, 2).reshape(b, s, a * d)
        y = x + F.linear(context, proj_w)
        u = F.linear(y, up_w)
        u = F.silu(u[..., : shape.ffn]) * u[..., shape.ffn :] if gated else F.gelu(u)
        logits = F.linear(y + F.linear(u, down_w), head_w)
        forward = counter.get_total_flops()
        logits.sum().backward()
    assert forward == flops.model_forward(shape, b)
    assert counter.get_total_flops() == flops.model_flops(shape, b)


def test_importing_does_not_import_torch() -> None:
    code = "import sys; import megackpt.plan.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
