"""The report says what is kept at this moment: everything after the forward, nothing after the backward."""
from __future__ import annotations

import torch
from torch import nn

from megackpt.plan import ChunkPlan, Group
from megackpt.recompute import KeptBytes, Tape, at, chain, checkpoint, report, save_boundaries, save_only_these_names
from megackpt.recompute.report import Row


def forward(label: str, account: KeptBytes, policy: ChunkPlan) -> tuple[Tape, torch.Tensor]:
    weight = nn.Parameter(torch.randn(8, 8))
    with Tape(policy, account=account, label=label) as tape:
        x = torch.randn(4, 8) * 1
        for i in range(2):
            layer = at(f"layers.{i}")
            x = layer("act", torch.sin, layer("up", torch.matmul, x, weight))
    return tape, x.sum()


def test_by_micro_batch_layer_and_step() -> None:
    account = KeptBytes()
    first, loss = forward("micro-batch 0", account, save_only_these_names("act", "up"))
    second, other = forward("micro-batch 1", account, save_boundaries("act"))
    full = report([first, second])
    assert full.rows == (
        Row("micro-batch 0", "layers.0", "up", 128),
        Row("micro-batch 0", "layers.0", "act", 128),
        Row("micro-batch 0", "layers.1", "up", 128),
        Row("micro-batch 0", "layers.1", "act", 128),
        Row("micro-batch 1", "layers.0", "up", 128),
        Row("micro-batch 1", "layers.1", "up", 128),
    )
    assert full.nbytes == 768 == account.live
    assert full.by_tape() == {"micro-batch 0": 512, "micro-batch 1": 256}
    assert full.by_step() == {"up": 512, "act": 256} and full.by_layer() == {"layers.0": 384, "layers.1": 384}
    loss.backward()
    assert report(first).rows == () and report([first, second]).by_tape() == {"micro-batch 1": 256}
    del other
    assert report(second).nbytes == 0


def test_as_data_and_as_a_table() -> None:
    tape, loss = forward("", KeptBytes(), save_boundaries("act"))
    shown = report(tape)
    assert shown.to_json() == [
        {"tape": "0", "layer": "layers.0", "step": "up", "bytes": 128},
        {"tape": "0", "layer": "layers.1", "step": "up", "bytes": 128},
    ]
    assert str(shown) == (
        "tape  layer     step  bytes\n"
        "0     layers.0  up      128\n"
        "0     layers.1  up      128\n"
        "sum                     256"
    )
    del loss


def test_groups_and_checkpoints_are_named() -> None:
    layers = [(i, nn.Linear(8, 8)) for i in range(3)]
    account = KeptBytes()
    with Tape(ChunkPlan(groups=(Group(0, 2),)), account=account) as tape:
        out = checkpoint(nn.Tanh(), chain(layers, torch.randn(4, 8) * 1) * 1).sum()
    assert report(tape).rows == (Row("0", "layers 0 to 2", "", 128), Row("0", "", "checkpoint(Tanh)", 128))
    out.backward()
    assert report(tape).rows == ()
