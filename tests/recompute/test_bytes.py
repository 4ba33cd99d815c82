"""Bytes kept for backward, per layer and step, exactly, for every policy.

What a layer keeps under policy none, e bytes per element, q = heads x head size, k = kv heads x head size,
`part` = t under sequence parallelism and 1 without it, f feed-forward size, twice that (g = 2) into a gated MLP:

    attn.norm      its input (the layer's)                       e·s·b·h/part
                   mean and rstd (RMSNorm: rstd alone), fp32     8·s·b/part (4)
    attn.gather    the norm output: this rank's part             e·s·b·h/part     } without gathers the
    attn.qkv       (the gathered tensor is replayed)                              } norm output whole
    attn.core      queries, keys, values in one storage          e·s·b·(q+2k)/t
        fused      log-sum-exp, fp32                             4·a·b·s/t
        unfused    softmax                                       e·a·s²·b/t
                   with dropout its dropped-out copy and a mask  (e+1)·a·s²·b/t
    attn.proj      the core's output                             e·s·b·q/t
    attn.residual  mask, with dropout                            s·b·h/part
    mlp.norm       attn.residual's output, statistics            as above
    mlp.gather/up  the norm output                               as above
    mlp.act        the output of up                              e·s·b·g·f/t
    mlp.down       the output of act                             e·s·b·f/t
    mlp.residual   mask, with dropout                            s·b·h/part

With e = 2, q = h, k = h, f = 4h, t = 1 and dropout the elements are 34·sbh + 5as²b (Korthikanti et al. 2022, Table 2):
2 + 2 + 6 + 2 + 1 + 2 + 2 + 8 + 8 + 1 = 34.  The other policies keep less of the same terms; which, says `dropped`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megackpt.config.model import ModelConfig
from megackpt.recompute import KeptBytes
from tests.pool import run_distributed
from tests.recompute.models import POLICIES, VOCAB, B, L, S, Subject, plan_of, shape
from tests.recompute.probes import Census, saved_storages
from tests.tensor.probes import world_axis

CORE = ("softmax", "dropped softmax", "attention mask", "log-sum-exp", "core")
MASKS = ("attention mask", "mask 1", "mask 2")
STATISTICS = ("statistics 1", "statistics 2")
NORMS = ("norm 1", "norm 2")


@dataclass(frozen=True)
class Case:
    family: str
    fused: bool
    dropout: float
    sequence_parallel: bool = False
    t: int = 1
    element: int = 4
    statistic: int = 4  # bytes of one statistic of a norm: fp32 on every device, but see bf16 below

    def __str__(self) -> str:
        words = [self.family, "fused" if self.fused else "unfused", "dropout" if self.dropout else "no-dropout"]
        return "-".join(words + (["tp2"] if self.t > 1 else []) + (["sp"] if self.sequence_parallel else []))

    @property
    def config(self) -> ModelConfig:
        """A fused core with dropout takes another kernel on a CPU, so its dropout is in the residuals only."""
        changes: dict[str, Any] = {"fused_attention": self.fused, "hidden_dropout": self.dropout}
        if not self.fused:
            changes["attention_dropout"] = self.dropout
        if self.family == "llama" and self.t > 1:
            changes["num_query_groups"] = 2
        return shape(self.family, **changes)

    def terms(self) -> dict[str, int]:
        """Bytes of everything that policy none keeps of one layer, by name (the table above)."""
        c, t, e = self.config, self.t, self.element
        part = t if self.sequence_parallel else 1
        sb, sbh, q, k = S * B, S * B * c.hidden_size, c.num_attention_heads * 8, c.num_query_groups * 8
        scores = c.num_attention_heads * S * S * B
        statistics = self.statistic * (2 if self.family == "gpt" else 1) * sb // part
        terms = {
            "input": e * sbh // part,
            "statistics 1": statistics,
            "norm 1": e * sbh // part,
            "qkv": e * sb * (q + 2 * k) // t,
            "core": e * sb * q // t,
            "residual": e * sbh // part,
            "statistics 2": statistics,
            "norm 2": e * sbh // part,
            "up": e * sb * c.ffn_hidden_size * (2 if c.gated else 1) // t,
            "act": e * sb * c.ffn_hidden_size // t,
        }
        if self.fused:
            terms["log-sum-exp"] = 4 * c.num_attention_heads * B * S // t
        else:
            terms["softmax"] = e * scores // t
        if self.dropout:
            terms |= {"mask 1": sbh // part, "mask 2": sbh // part}
            if not self.fused:
                terms |= {"dropped softmax": e * scores // t, "attention mask": scores // t}
        return terms

    def ends(self, masks: bool) -> int:
        """Embedding and head: ids, the mask after the embedding; input, statistics and output of the final norm, the
        softmax of the loss in fp32 (columns of this rank) and its labels."""
        c, t, e = self.config, self.t, self.element
        part = t if self.sequence_parallel else 1
        sb, sbh, v = S * B, S * B * c.hidden_size, c.padded_vocab_size(VOCAB, t)
        mask = sbh // part if self.dropout and masks else 0
        statistics = self.statistic * (2 if self.family == "gpt" else 1) * sb // part
        return 8 * sb + mask + e * sbh // part + statistics + e * sbh // part + 4 * sb * v // t + 8 * sb


def kept_terms(policy: str, place: int) -> set[str]:
    """Names of the terms that the `place`-th layer of five keeps."""
    every = set(Case("gpt", True, 0.1).terms()) | set(Case("gpt", False, 0.1).terms())
    masked = every - set(MASKS)
    first_of_group = {"uniform-2": place % 2 == 0, "uniform-3": place % 3 == 0}
    if policy in first_of_group:
        return {"input"} if first_of_group[policy] else set()
    if policy.startswith("block") and place >= POLICIES[policy]["num_layers"]:
        return every
    return {
        "none": every,
        "free": masked - {*NORMS, "act"},
        "core": masked - set(CORE),
        "norms": masked - {*NORMS, *STATISTICS},
        "mlp": masked - {"up", "act"},
        "modules": masked - {*CORE, *NORMS, *STATISTICS, "up", "act"},
        "up": masked - {"up"},
        "full": {"input", "residual"},
        "full-input": {"input"},
        "block-1": {"input", "residual"},
        "block-3": {"input", "residual"},
        "block-3-input": {"input"},
    }[policy]


def layer_bytes(case: Case, policy: str, place: int) -> int:
    kept = kept_terms(policy, place)
    return sum(nbytes for name, nbytes in case.terms().items() if name in kept)


def expected(case: Case, policy: str) -> int:
    return case.ends(masks=policy == "none") + sum(layer_bytes(case, policy, place) for place in range(L))


@dataclass(frozen=True)
class Found:
    alive: int  # a census of storages, the loss among them
    counted: int  # the tape's count
    report: dict[str, int]
    plain: int | None = None  # what plain autograd saves, for policy none


def settled(census: Census, wanted: int) -> int:
    """Bytes alive; communication threads may let go of a buffer a little after its collective."""
    deadline = time.monotonic() + 2.0
    while census.bytes > wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    return census.bytes


def measure(subject: Subject, case: Case) -> dict[str, Found]:
    found = {}
    for policy in POLICIES:
        subject.reset()
        with Census() as census:
            loss, tape = subject.forward(plan_of(policy), KeptBytes())
        assert tape is not None
        alive = settled(census, expected(case, policy) + loss.nbytes) - loss.nbytes
        found[policy] = Found(alive, tape.saved_bytes(), tape.report())
        loss.backward()
        gradients = sum(p.grad.nbytes for p in subject.chunk.parameters() if p.grad is not None)
        rest = settled(census, gradients + loss.nbytes)
        assert rest <= gradients + loss.nbytes, f"{policy}: something of the forward outlives its backward"
    subject.reset()
    with saved_storages() as saved:
        loss, _ = subject.forward(None)
    plain = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    found["none"] = Found(found["none"].alive, found["none"].counted, found["none"].report, plain)
    return found


def check(case: Case, found: dict[str, Found]) -> None:
    for policy in POLICIES:
        wanted = expected(case, policy)
        assert found[policy].alive == wanted, f"{policy}: {found[policy].alive - wanted} bytes too many are alive"
        assert found[policy].counted == wanted, f"{policy}: the tape counts {found[policy].counted - wanted} too many"
        report = found[policy].report
        assert sum(report.values()) == wanted
        for place in range(L):
            # the layer's input is the output of whoever came before; with groups it is reported by the group
            mine = sum(nbytes for where, nbytes in report.items() if where.startswith(f"layers.{place} "))
            if policy not in ("uniform-2", "uniform-3"):
                assert mine == layer_bytes(case, policy, place), f"{policy}: report of layer {place}"
    # Plain autograd differs from policy none in one thing: it keeps what was gathered, not this rank's part of it.
    gathers = (2 * L + 1) if case.sequence_parallel else 0
    more = case.element * S * B * case.config.hidden_size * (case.t - 1) // case.t
    assert found["none"].plain == expected(case, "none") + gathers * more


CASES = [Case(family, fused, p) for family in ("gpt", "llama") for fused in (True, False) for p in (0.0, 0.1)]
SPREAD = [
    Case(family, fused, p, sp, 2)
    for family, fused, p, sp in (
        ("gpt", False, 0.1, True),
        ("gpt", True, 0.0, False),
        ("llama", True, 0.1, True),
        ("llama", False, 0.1, False),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_every_policy(case: Case) -> None:
    check(case, measure(Subject(case.config), case))


def _measure_rank(rank: int, world_size: int, case: Case) -> dict[str, Found]:
    return measure(Subject(case.config, world_axis(rank, world_size), case.sequence_parallel), case)


@pytest.mark.parametrize("case", SPREAD, ids=str)
def test_bytes_of_every_policy_on_two_ranks(case: Case) -> None:
    for found in run_distributed(_measure_rank, 2, case, timeout=60):
        check(case, found)


def test_paper_table_in_16_bit() -> None:
    """34·sbh + 5as²b per layer for the paper's shape (Table 2), statistics besides; selective: 34·sbh less the masks
    and the core's output, which are replayed here as well; full: 4·sbh, or 2·sbh."""
    config = shape("gpt", ffn_hidden_size=4 * 48, fused_attention=False, hidden_dropout=0.1, attention_dropout=0.1)
    subject = Subject(config, dtype=torch.bfloat16)
    sb, sbh, scores = S * B, S * B * 48, 6 * S * S * B
    paper = {
        "none": 34 * sbh + 5 * scores,
        "free": (34 - 2 - 4 - 8) * sbh + 4 * scores,
        "core": (34 - 2 - 2) * sbh,
        "full": 4 * sbh,
        "full-input": 2 * sbh,
    }
    # A CPU's layer norm keeps its statistics in the type of its weights; on a GPU they are fp32.
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    statistic = torch.native_layer_norm(x, (48,), x[0], x[0], 1e-5)[1].element_size()
    for policy, wanted in paper.items():
        subject.reset()
        with Census() as census:
            loss, tape = subject.forward(plan_of(policy), KeptBytes())
        assert tape is not None
        report = tape.report()
        statistics = 0 if policy.startswith("full") else 2 * 2 * statistic * sb
        for place in range(L):
            mine = sum(nbytes for where, nbytes in report.items() if where.startswith(f"layers.{place} "))
            assert mine == wanted + statistics, policy
        assert census.bytes - loss.nbytes == tape.saved_bytes()


def test_selective_core_frees_nothing_worth_a_forward_where_attention_is_fused() -> None:
    """ME-01: without the s x s tensors all that is left is the output and the log-sum-exp, (2 + 4a/h) sbh of 16-bit
    bytes; unfused, without dropout, it is 2as²b more."""
    for fused in (True, False):
        case = Case("gpt", fused, 0.0)
        output = 4 * S * B * 48
        freed = layer_bytes(case, "none", 0) - layer_bytes(case, "core", 0)
        assert freed == output + (4 * 6 * B * S if fused else 4 * 6 * S * S * B)


def test_account_follows_tapes() -> None:
    """One account over micro-batches in flight: it grows at the end of each forward and shrinks at close."""
    case = Case("gpt", True, 0.0)
    subject, account = Subject(case.config), KeptBytes()
    per_tape = expected(case, "full")
    flights = [subject.forward(plan_of("full"), account) for _ in range(3)]
    assert (account.live, account.peak) == (3 * per_tape, 3 * per_tape)
    for number, (loss, tape) in enumerate(flights, 1):
        assert tape is not None
        loss.backward()
        tape.close()
        tape.close()  # a second close changes nothing
        assert account.live == (3 - number) * per_tape
    assert account.peak == 3 * per_tape
    account.reset_peak()
    assert account.peak == 0
