"""Save-sets of a layer: how many remain, what each costs, and that consumers are never replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megackpt.plan.choose.pareto import group_items, layer_items, priced, prune, save_sets
from megackpt.plan.choose.prices import PICO, StepPrices
from megackpt.plan.decision import Decision, SaveSet
from tests.plan.choose.layer import FIGURES, small_prices
from tools.bench_planner import MIB, layer_prices


def kept_names(save_set: SaveSet) -> set[str]:
    """Steps whose output and internals are kept; a core of which only one is goes by another name."""
    names = {name for name, d in save_set.decisions.items() if name != "mlp.residual" and d.output == "keep"}
    core = save_set["attn.core"]
    return names - {"attn.core"} | {"attn.core, half"} if core.output != core.internals else names


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_256_subsets_collapse(fused: bool, shared: bool) -> None:
    pricing = layer_prices(FIGURES, fused, shared)
    sets = save_sets(pricing.absent)
    assert len(set(sets)) == 256
    left = prune(priced(pricing, sets), transient=False)
    assert len(left) == FIGURES["pareto_sets"]["fused" if fused else "unfused"]


@pytest.mark.parametrize("row", FIGURES["replay_us"], ids=lambda row: "+".join(row["kept"]) or "nothing")
@pytest.mark.parametrize("shared", [True, False])
def test_replay_of_the_figures(row: dict[str, object], shared: bool) -> None:
    pricing = layer_prices(FIGURES, True, shared)
    (item,) = [i for i in layer_items(pricing) if i.save_set and kept_names(i.save_set) == set(row["kept"])]  # type: ignore
    assert item.replay_ps / 1e6 == pytest.approx(row["shared" if shared else "unshared"], abs=1.5)
    assert item.kept_bytes / MIB == pytest.approx(row["mib"], abs=0.1)


def test_a_whole_layer_takes_what_the_figures_say() -> None:
    fused, unfused = (layer_prices(FIGURES, fused, False) for fused in (True, False))
    assert [round(x * 1e5) for x in (fused.forward_seconds, fused.backward_seconds)] == [228, 429]
    assert [round(x * 1e5) for x in (unfused.forward_seconds, unfused.backward_seconds)] == [260, 509]


def test_consumers_are_never_replayed() -> None:
    pricing = small_prices()
    for save_set in save_sets(pricing.absent, keep_gathered=True):
        names = pricing.replayed(save_set)
        assert not {"mlp.down", "mlp.reduce", "mlp.residual"} & set(names)
        if "attn.residual" in save_set.decisions:
            assert not {"attn.proj", "attn.reduce", "attn.residual"} & set(names)


def test_a_kept_ancestor_ends_the_replay() -> None:
    pricing = small_prices(shared=False)
    by_kept = {frozenset(kept_names(s)): s for s in save_sets(pricing.absent)}

    def us(*kept: str) -> int:
        return round(pricing.replay_seconds(by_kept[frozenset(kept)]) * 1e6)

    everything = us()
    assert everything == 5 + 50 + 400 + 40 + 130 + 50 + 8 + 5 + 50 + 530 + 20
    assert everything - us("attn.residual") == 130 + 50 + 8
    assert everything - us("attn.qkv") == 50 + 400  # its own gather is spared, the norm is not
    assert us("attn.residual", "attn.qkv", "mlp.up", "attn.core", "attn.norm", "mlp.norm", "mlp.act") == 0


def test_the_switch_shares_gathers_or_not() -> None:
    apart, shared = small_prices(False), small_prices(True)
    for save_set in save_sets(apart.absent):
        products = sum(name in apart.replayed(save_set) for name in ("attn.qkv", "mlp.up"))
        assert apart.replay_seconds(save_set) - shared.replay_seconds(save_set) == pytest.approx(50e-6 * products)


def test_a_kept_gathered_tensor_spares_the_gather_of_the_weight_gradient() -> None:
    pricing = small_prices()
    best = min(priced(pricing, save_sets(pricing.absent, keep_gathered=True)), key=lambda i: i.replay_ps)
    assert best.replay_ps == -100 * PICO // 10**6


def test_rope_may_be_rebuilt_from_a_kept_product() -> None:
    plain = small_prices()
    rope = StepPrices(
        {**plain.steps, "attn.rope": replace(plain.steps["attn.norm"], output_bytes=4)}, 2, plain.backward_seconds
    )
    sets = save_sets(rope.absent)
    assert len(set(sets)) == 512
    both = [s for s in sets if {"attn.qkv"} == kept_names(s)]
    assert "attn.rope" in rope.replayed(both[0]) and "attn.qkv" not in rope.replayed(both[0])


def test_an_output_that_is_an_internal_stays_with_the_others_and_counts_once() -> None:
    """As a fused core's: the decision to drop the output alone neither frees nor replays anything."""
    apart = small_prices()
    core = replace(apart.steps["attn.core"], internal_bytes=3)  # its output's 2 among them
    fused = replace(apart, steps={**apart.steps, "attn.core": core}, held=frozenset({"attn.core"}))
    everything, no_output = SaveSet(), SaveSet({"attn.core": Decision("replay", "keep")})
    assert fused.replayed(no_output) == () and apart.replayed(no_output) == ("attn.core",)
    assert fused.kept_bytes(no_output) == fused.kept_bytes(everything) == apart.kept_bytes(everything)
    assert fused.replay_seconds(no_output) == fused.replay_seconds(everything)
    assert fused.transient_bytes(no_output) == 0
    dropped = SaveSet({"attn.core": Decision("replay", "replay")})
    assert fused.kept_bytes(dropped) == fused.kept_bytes(everything) - 3
    assert fused.transient_bytes(dropped) == 3 and fused.replayed(dropped) == ("attn.core",)


def test_pruning_keeps_one_of_equals_and_nothing_that_is_beaten() -> None:
    items = layer_items(small_prices())
    for a in items:
        for b in items:
            beaten = (
                a.kept_bytes <= b.kept_bytes and a.replay_ps <= b.replay_ps and a.transient_bytes <= b.transient_bytes
            )
            assert a is b or not beaten


def test_a_group_keeps_its_input_alone_and_spares_the_last_product() -> None:
    pricing = small_prices()
    one, three = group_items(pricing, [1, 3])
    assert (one.kept_bytes, three.kept_bytes) == (2, 2)
    forward = round(pricing.forward_seconds * 1e6) - 100  # gathers are shared
    assert (one.replay_ps, three.replay_ps) == ((forward - 588) * 10**6, (3 * forward - 588) * 10**6)
    everything = 2 + 1 + 6 + 2 + 1 + 2 + 2 + 1 + 8 + 8
    assert (one.transient_bytes, three.transient_bytes) == (everything, 3 * everything + 2 * 2)
