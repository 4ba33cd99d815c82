"""Heads that do not divide over ranks: groups of zero heads make them divide, and change nothing.

With zero values the core of a padded head gives zero, and the output projection's zero columns give it no gradient;
so every weight of a padded head has the gradient zero, and neither Adam nor weight decay moves it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megackpt.config.errors import UsageError
from megackpt.config.parallel import ParallelConfig
from megackpt.config.parse import parse_all
from megackpt.config.run import RunConfig
from megackpt.mesh.device import DeviceSeam
from megackpt.mesh.parameter import gather_full
from megackpt.model.decoding import Decoder
from megackpt.persist.convert import read_checkpoint, read_folder, write_checkpoint, write_folder
from megackpt.train.build import Trainer, build
from megackpt.train.checkpoint import Position, load_run
from megackpt.train.generate import load_generator
from tests.layouts import SMALL_LLAMA, Flags, Layout, Trace, built, distance, save_run, steps, words
from tests.persist.convert.made import VOCAB, equal, llama, tensors_of, weights_of
from tests.pool import run_distributed

OWN: Flags = SMALL_LLAMA | {
    "num-attention-heads": 9,
    "num-query-groups": 3,
    "kv-channels": 10,
    "disable-bias-linear": False,
    "weight-decay": 0.1,
    "params-dtype": "fp64",
}
PADDED: Flags = OWN | {"num-attention-heads": 12, "num-query-groups": 4, "unpadded-query-groups": 3}
FULL: Flags = {"recompute-granularity": "full"}
UNFUSED: Flags = {"attention-backend": "unfused", "recompute-granularity": "selective"}


def padding_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, gradients and moments of this stage's padded heads."""
    found = {}
    states = trainer.optimizer.state_tensors()
    gradients = {entry.record.name: entry.gradient for entry in trainer.buffer.entries}
    for parameter, record in trainer.parameters:
        if record.valid is None or record.of_vocabulary:
            continue
        kinds = {"weight": parameter, "gradient": gradients[record.name]}
        for kind, local in {**kinds, **{kind: tensors[record.name] for kind, tensors in states.items()}}.items():
            whole = gather_full(local.detach(), record, trainer.mesh.tp)
            dim = record.padded_dim
            found[f"{kind} {record.name}"] = whole.narrow(dim, record.valid, whole.shape[dim] - record.valid).clone()
    return found


def trained(rank: int, world: int, flags: Flags, layout: Layout) -> tuple[Trace, dict[str, Tensor], int]:
    trainer = built(flags, layout)
    trace = steps(trainer, 3, gradients_of=3)
    layers = sum(record.name.endswith("attn.norm.weight") for _, record in trainer.parameters)
    return trace, padding_of(trainer), layers


def test_padded_heads_change_nothing_and_stay_zero() -> None:
    ((expected, none, _),) = run_distributed(trained, 1, OWN, Layout())
    assert none == {}
    for layout, extra in (
        (Layout(), {}),
        (Layout(tp=2), FULL),
        (Layout(tp=2, sp=True), UNFUSED),
        (Layout(tp=2, pp=2), FULL),
    ):
        for trace, padding, layers in run_distributed(trained, layout.world_size, PADDED | extra, layout):
            distance(trace, expected).check(loss=1e-12, norm=1e-12, gradient=1e-12)
            assert len(padding) == layers * 4 * 3  # weight, gradient, two moments of qkv, its bias, and proj
            assert {name for name, part in padding.items() if part.count_nonzero()} == set()
            assert {tuple(part.shape) for part in padding.values()} == {(50, 48), (50,), (48, 30)}


def logits_at(rank: int, world: int, root: str, tensor: int) -> tuple[Tensor, int]:
    generator = load_generator(root, ParallelConfig(tensor=tensor, world_size=world), DeviceSeam.create("cpu", 0, None))
    decoder = Decoder(generator.chunk, generator.tp, sequences=1, capacity=20)
    ids = torch.arange(3, 23)[None] * 11 % VOCAB
    return torch.cat([decoder(part) for part in ids.split([17, 1, 1, 1], dim=1)]), generator.model.num_query_groups


def through_a_run(rank: int, world: int, line: list[str]) -> dict[str, int]:
    config = parse_all(line, {}, world).config
    trainer = build(config, DeviceSeam("cpu", torch.device("cpu"), "gloo"))
    load_run(trainer)
    assert {name for name, part in padding_of(trainer).items() if part.count_nonzero()} == set()
    save_run(trainer, Position(0, 0))
    return {name: getattr(config.model, name) for name in ("num_attention_heads", "num_query_groups")}


def test_converted_for_two_ranks_and_back(tmp_path: Path) -> None:
    """Hugging Face -> padded -> loaded and saved by two ranks -> Hugging Face, the same bits; logits as unpadded."""
    model = llama(9, 3, 10, bias=True)
    write_folder(tmp_path / "theirs", weights_of(model))
    write_checkpoint(tmp_path / "one", read_folder(tmp_path / "theirs"))
    write_checkpoint(tmp_path / "two", read_folder(tmp_path / "theirs"), tensor_parallel=2)
    assert equal(read_checkpoint(tmp_path / "two"), tensors_of(model))
    kept = ("micro-batch-size", "global-batch-size", "mock-data", "num-workers", "lr", "train-iters")
    flags = {key: OWN[key] for key in kept}
    flags |= {"save": str(tmp_path / "run"), "use-checkpoint-args": True, "finetune": True, "vocab-size": VOCAB}
    two = words(flags | {"load": str(tmp_path / "two")} | Layout(tp=2).flags)
    for found in run_distributed(through_a_run, 2, two):
        assert found == {"num_attention_heads": 12, "num_query_groups": 4}
    assert equal(read_checkpoint(tmp_path / "run"), tensors_of(model))
    write_folder(tmp_path / "back", read_checkpoint(tmp_path / "run"))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    ((plain, groups),) = run_distributed(logits_at, 1, str(tmp_path / "one"), 1)
    assert groups == 3
    for root, tensor, expected in (("one", 2, 4), ("run", 1, 3), ("run", 2, 4)):
        for logits, groups in run_distributed(logits_at, tensor, str(tmp_path / root), tensor):
            assert groups == expected and (logits - plain).abs().max() <= 2e-6
    # Another number of ranks has another padding.
    four = parse_all(words(flags | {"load": str(tmp_path / "run")} | Layout(tp=8).flags), {}, 8).config.model
    assert (four.num_attention_heads, four.num_query_groups, four.unpadded_query_groups) == (24, 8, 3)


def test_heads_that_do_not_divide_name_the_way_out(tmp_path: Path) -> None:
    way = "--num-attention-heads 12 --group-query-attention --num-query-groups 4 --unpadded-query-groups 3"
    with pytest.raises(UsageError, match=f"{way} --kv-channels 10, which loads its checkpoints as they are"):
        RunConfig.from_flags(OWN | Layout(tp=2).flags, 2)
    with pytest.raises(UsageError, match="--unpadded-query-groups 4 exceeds the 3 groups"):
        RunConfig.from_flags(OWN | {"unpadded-query-groups": 4})
    with pytest.raises(UsageError, match="--target-tensor-parallel-size 5 does not divide 168 columns of the MLP"):
        write_checkpoint(tmp_path / "five", weights_of(llama(9, 3, 10)), tensor_parallel=5)


def _loaded(rank: int, world: int, flags: Flags) -> str:
    with pytest.raises(UsageError) as refusal:
        load_run(built(flags))
    return str(refusal.value)


def _saved(rank: int, world: int, flags: Flags) -> None:
    save_run(built(flags), Position(1, 4))


def test_padding_is_not_taken_for_heads(tmp_path: Path) -> None:
    run_distributed(_saved, 1, PADDED | {"save": str(tmp_path)})
    real = {key: value for key, value in PADDED.items() if key != "unpadded-query-groups"}
    (said,) = run_distributed(_loaded, 1, real | {"load": str(tmp_path)})
    assert "layers.0.attn.qkv.weight has 150 rows there and 200 here (--unpadded-query-groups)" in said
    assert "layers.0.attn.proj.weight has 90 columns there and 120 here (--unpadded-query-groups)" in said
