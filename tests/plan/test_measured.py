"""The other system's published allocator counters against what its arguments say."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from megackpt.plan.megatron import predict_memory, read_arguments
from megackpt.plan.megatron.memory import boundary_bytes, core_bytes, layer_bytes
from tools.predict_measured import CASES, main, rows_of, summary, table

DATA = json.loads(CASES.read_text())["cases"]
ARGS = {
    "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024, "micro-batch-size": 4,
    "global-batch-size": 32, "bf16": True, "no-gradient-accumulation-fusion": True,
}  # fmt: skip


def test_errors_of_all_cases():
    _, rows = table(DATA)
    counted = [row for row in rows if row.memory is not None and not row.note.startswith("12/d")]
    assert {row.case["case"] for row in counted} == {case["case"] for case in DATA}
    assert statistics.median(abs(row.peak_error) for row in counted) <= 0.005
    assert max(abs(row.peak_error) for row in counted) <= 0.03
    assert statistics.median(abs(row.state_error) for row in counted) <= 0.01
    assert max(abs(row.state_error) for row in counted) <= 0.03
    assert "0 peaks beyond 5%" in summary(rows)


def test_names_do_not_matter():
    for case in DATA[:8]:
        assert [r.memory for r in rows_of({**case, "case": "x"})] == [r.memory for r in rows_of(case)]


def test_unfused_core_is_the_difference_of_two_runs():
    """Two published runs that differ in the attention kernel alone: 5as²b for each of the last stage's layers."""
    fused = read_arguments({**ARGS, "pipeline-model-parallel-size": 4, "attention-backend": "fused"}, 8, "h100")
    unfused = fused.with_attention("unfused")
    assert core_bytes(unfused) == 5 * 8 * 1024**2 * 4
    difference = predict_memory(unfused).peak_bytes - predict_memory(fused).peak_bytes
    assert difference == 3 * (core_bytes(unfused) - core_bytes(fused))


def test_layer_is_table_2_of_the_paper():
    run = read_arguments({**ARGS, "attention-backend": "unfused"}, 8, "a100")
    sbh = 1024 * 4 * 512
    statistics_of_norms = 2 * 8 * 1024 * 4
    assert layer_bytes(run) == 34 * sbh + 5 * 8 * 1024**2 * 4 + statistics_of_norms
    assert boundary_bytes(run) == 2 * sbh
    assert layer_bytes(replace(run, recompute="core")) == 34 * sbh + statistics_of_norms


@pytest.mark.parametrize(("precision", "between", "peak"), [("bf16", 18, 18), ("fp16", 20, 16)])
def test_state_per_parameter(precision, between, peak):
    args = {name: value for name, value in ARGS.items() if name != "bf16"} | {precision: True}
    memory = predict_memory(read_arguments(args, 8, "a100"))
    assert memory.between["state"] == between * memory.parameters
    assert memory.peak["state"] == peak * memory.parameters


def test_what_is_not_modelled_is_said():
    args = {**ARGS, "num-experts": 8, "multi-latent-attention": True}
    (row,) = rows_of({"case": "x", "hardware": "h100", "gpus": 8, "alloc": 1, "peak": 1, "args": args})
    assert row.memory is None
    assert "num-experts: needs tokens" in row.note
    with pytest.raises(ValueError, match="num-experts needs"):
        predict_memory(read_arguments(args, 8, "h100"))


def test_data_parallel_size_that_the_file_does_not_know():
    case = next(c for c in DATA if rows_of(c)[0].note.startswith("12/d"))
    first, second = rows_of(case)
    assert abs(first.peak_error) > 0.5 > abs(second.peak_error) * 50
    named = rows_of({**case, "world_size": case["gpus"] * 16})
    assert len(named) == 1 and named[0].memory == second.memory


def test_uneven_last_stage():
    args = {**ARGS, "pipeline-model-parallel-size": 4, "decoder-last-pipeline-num-layers": 1}
    assert read_arguments(args, 8, "h100").layers_by_chunk == (1,)
    args = {**ARGS, "num-layers": 11, "pipeline-model-parallel-size": 4, "account-for-loss-in-pipeline-split": True}
    assert read_arguments(args, 8, "h100").layers_by_chunk == (2,)


def test_table_is_printed(capsys):
    assert main([str(CASES), "--terms"]) == 0
    out = capsys.readouterr().out
    assert "peak median" in out and "activations" in out
