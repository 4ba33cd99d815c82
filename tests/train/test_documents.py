"""--reset-position-ids and --reset-attention-mask: documents as if alone, on all layouts, replay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megackpt.data.dataset import document_lengths
from megackpt.data.indexed_writer import IndexedWriter
from megackpt.model.documents import Documents
from tests.layouts import SMALL_GPT, SMALL_LLAMA, Flags, Layout, Trace, batches_of, built, distance, steps
from tests.plan.live_run import run_cases
from tests.pool import run_distributed

EOD = 508
LENGTHS = [3, 1, 9, 40, 2, 5, 1, 1, 14, 7]
RESETS: Flags = {"reset-position-ids": True, "reset-attention-mask": True}
FAMILIES = {"gpt": SMALL_GPT, "llama": SMALL_LLAMA}
ONE = Layout()
UNFUSED: Flags = {"attention-backend": "unfused"}


def flags_of(folder: Path, family: str, **more: object) -> Flags:
    """A run over short documents in fp64."""
    if not (folder / "d.idx").exists():
        rng = np.random.default_rng(3)
        with IndexedWriter(folder / "d", np.dtype("<u2")) as writer:
            for length in LENGTHS * 6:
                writer.add([*rng.integers(0, EOD, length - 1).tolist(), EOD])
    given = {k: v for k, v in FAMILIES[family].items() if k not in ("mock-data", "vocab-size")}
    data = {"data-path": str(folder / "d"), "split": "1,0,0", "tokenizer-type": "NullTokenizer", "vocab-size": EOD}
    return given | data | {"params-dtype": "fp64", **RESETS, **{k.replace("_", "-"): v for k, v in more.items()}}


def losses_of(chunk: Any, batch: dict[str, Tensor], documents: Documents | None) -> Tensor:
    with torch.no_grad():
        found: Tensor = chunk(batch["tokens"], batch["labels"], documents)
    return found.t()  # [b, s]


def documents_of(batch: dict[str, Tensor]) -> Documents:
    return Documents(batch["position_ids"], batch["segments"], document_lengths(batch["segments"].numpy()))


def _alone(rank: int, world_size: int, flags: Flags) -> tuple[float, int, bool]:
    """Largest distance of a token's loss from that of its document alone, number of documents, and whether other
    tokens in one document change no loss of another, to the last bit."""
    trainer = built(flags)
    chunk = trainer.chunks[0].eval()
    batch = next(batches_of(trainer))
    documents = documents_of(batch)
    together = losses_of(chunk, batch, documents)
    worst, count = 0.0, 0
    for row, lengths in enumerate(documents.lengths):
        at = 0
        for length in lengths:
            part = {name: batch[name][row : row + 1, at : at + length] for name in ("tokens", "labels")}
            alone = losses_of(chunk, part, None)
            worst = max(worst, float((together[row, at : at + length] - alone[0]).abs().max()))
            at, count = at + length, count + 1
    row = max(range(len(documents.lengths)), key=lambda r: len(documents.lengths[r]))
    first = documents.lengths[row][0]
    batch["tokens"][row, : first - 1] = 7  # its eod stays, and so do the borders
    changed = losses_of(chunk, batch, documents)
    same = torch.equal(changed[row, first:], together[row, first:])
    return worst, count, same and (first == 1 or not torch.equal(changed[row, :first], together[row, :first]))


@pytest.mark.parametrize("core", ["fused", "unfused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_document_is_as_if_it_stood_alone(tmp_path: Path, family: str, core: str) -> None:
    """VC-08: [A B eod C D]: C and D cannot see A and B, and their positions begin at 0."""
    flags = flags_of(tmp_path, family) | (UNFUSED if core == "unfused" else {})
    ((worst, count, same),) = run_distributed(_alone, 1, flags)
    assert worst < 1e-12 and count > 9 and same


def _trace(rank: int, world_size: int, flags: Flags, layout: Layout, file: str) -> None:
    steps(built(flags, layout), 2, gradients_of=2).save(Path(f"{file}-{rank}"))


def traced(folder: Path, name: str, flags: Flags, layout: Layout = ONE) -> list[Trace]:
    run_distributed(_trace, layout.world_size, flags, layout, str(folder / name))
    return [Trace.read(Path(f"{folder / name}-{rank}")) for rank in range(layout.world_size)]


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_agree(tmp_path: Path, family: str) -> None:
    """Sequence parallelism cuts the positions, stages all read the documents."""
    flags = flags_of(tmp_path, family)
    (expected,) = traced(tmp_path, "one", flags)
    for layout in (Layout(tp=2, sp=True), Layout(pp=2)):
        for found in traced(tmp_path, str(layout), flags, layout):
            distance(found, expected).check(loss=1e-12, norm=1e-12, gradient=1e-12)
    plain = {k: v for k, v in flags.items() if k not in RESETS}
    (other,) = traced(tmp_path, "plain", plain)
    assert abs(other.losses[0] - expected.losses[0]) > 1e-6


REPLAYS: dict[str, Flags] = {
    "selective": {"recompute-granularity": "selective"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    "groups": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
}


@pytest.mark.parametrize("core", ["fused", "unfused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_is_exact(tmp_path: Path, family: str, core: str) -> None:
    """Bit for bit, with dropout; several micro-batches with other documents are under way at once."""
    dropout: Flags = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    flags = flags_of(tmp_path, family, **dropout) | (UNFUSED if core == "unfused" else {})
    (expected,) = traced(tmp_path, "none", flags)
    for name, more in REPLAYS.items():
        (found,) = traced(tmp_path, name, flags | more)
        assert found.losses == expected.losses and found.norms == expected.norms
        for mine, theirs in zip(found.grads, expected.grads, strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs), name


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_bytes_are_predicted(tmp_path: Path, family: str) -> None:
    """No mask is stored: what comes on top of a run without resets is the joined output and the learned positions."""
    flags = flags_of(tmp_path, family) | {"params-dtype": "fp32"}
    cases = [flags | UNFUSED, flags, flags | REPLAYS["full"], flags | {"micro-batch-size": 1}]
    for index, ((seen, predicted),) in enumerate([[c] for c in run_distributed(run_cases, 1, cases, Layout())[0]]):
        assert seen.kept == predicted.kept_peak_bytes, index
