"""Random streams and our dropout: a draw is a pure function of (seed, position), and can be had again."""

from __future__ import annotations

import itertools

import pytest
import torch

from megackpt.plan import Decision
from megackpt.recompute import KeptBytes, RngLedger, Stream, Tape, dropout, keep_scale, step
from megackpt.recompute.dropout import keep_mask
from megackpt.recompute.rng import mix
from tests.recompute.harness import assert_same, numbers, plan

X = numbers(60, 80)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    a, b = Stream("a", 3), Stream("b", 3)
    first, second = torch.rand(5, generator=a.draw()), torch.rand(5, generator=a.draw())
    torch.rand(17, generator=b.at(0))  # however much is drawn, and whatever moves elsewhere
    assert torch.equal(torch.rand(5, generator=b.at(1)), second) and b.position == 0
    assert torch.equal(torch.rand(5, generator=b.draw()), first) and b.position == 1
    assert not torch.equal(first, second)
    assert not torch.equal(torch.rand(5, generator=Stream("c", 4).draw()), first)


def test_seeds_of_streams_and_positions_do_not_meet() -> None:
    seen = {mix(seed, position) for seed, position in itertools.product(range(100), range(100))}
    assert len(seen) == 10_000 and all(0 <= value < 2**63 for value in seen)


def test_lent_default_generator_is_put_back() -> None:
    stream = Stream("a", 3)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with stream.lend_default():
        inside = torch.rand(4)
    with pytest.raises(ValueError, match="inside"), stream.lend_default():
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), before) and stream.position == 2
    assert torch.equal(inside, torch.rand(4, generator=stream.at(0)))


def test_ledger_snapshots() -> None:
    def same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
        return a[:-1] == b[:-1] and torch.equal(a[-1], b[-1])  # type: ignore[arg-type]

    ledger = RngLedger()
    stream = ledger.register(Stream("a", 3))
    ledger.register(Stream("b", 4))
    with pytest.raises(ValueError, match="named 'a' is registered already"):
        ledger.register(Stream("a", 5))
    start = ledger.snapshot()
    for change in (stream.draw, lambda: torch.rand(1)):
        change()
        assert not same(ledger.snapshot(), start)
        ledger.restore(start)
        assert same(ledger.snapshot(), start)
    stream.draw()
    saved = ledger.state_dict()
    assert saved == {"a": 1, "b": 0}
    stream.draw()
    ledger.load_state_dict(saved)
    assert ledger.state_dict() == saved
    with pytest.raises(KeyError, match="streams of this run"):
        ledger.load_state_dict({"a": 1})
    assert RngLedger(defaults=False).snapshot() == ()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks(p: float) -> None:
    """Dropped with probability p rounded to 2^-16; the scale is that of the rounded p, so the mean is exact.  Within
    five standard deviations of a binomial count."""
    count = 200_000
    mask = keep_mask((count,), p, Stream("a", 1).draw())
    exact = round(p * 65536) / 65536
    deviation = (count * exact * (1 - exact)) ** 0.5
    assert mask.dtype == torch.bool and abs(int((~mask).sum()) - count * exact) < 5 * deviation
    assert keep_scale(p) == 65536 / (65536 - round(p * 65536)) and keep_scale(p) * (1 - exact) == 1.0
    assert keep_mask((3, 7), p, Stream("a", 1).draw()).shape == (3, 7)  # not a multiple of four words
    pairs = mask[:-1] ^ mask[1:]  # neighbours come out of one word, and are independent all the same
    unequal = 2 * exact * (1 - exact)
    assert abs(float(pairs.float().mean()) - unequal) < 5 * (unequal / count) ** 0.5


def test_dropout_values_and_gradient() -> None:
    stream = Stream("a", 2)
    x = X.clone().requires_grad_()
    y = dropout(x, 0.25, stream)
    mask = keep_mask(X.shape, 0.25, stream.at(0))
    assert torch.equal(y, X * mask * (4.0 / 3.0)) or torch.allclose(y, X * mask / 0.75, rtol=1e-7)
    y.sum().backward()
    assert torch.equal(x.grad, mask * torch.full_like(X, keep_scale(0.25)))
    assert dropout(x, 0.0, None) is x and dropout(x, 0.5, None, training=False) is x
    for p in (1.0, 0.999999, -0.1):
        with pytest.raises(ValueError, match=f"dropout of {p}: a probability"):
            dropout(x, p, stream)
    assert stream.position == 1


def test_kept_and_redrawn_masks_are_the_same_and_cost_what_they_should() -> None:
    """One byte per element, or nothing; the product before the dropout is not run again for it."""
    runs = []
    weight = torch.nn.Parameter(numbers(80, 80, seed=4))

    def body(stream: Stream, x: torch.Tensor) -> torch.Tensor:
        y = step("product", lambda x: runs.append(1) or x @ weight, x)
        return step("residual", lambda x, y: x + dropout(y, 0.3, stream), x, y)

    found = {}
    for masks in ("keep", "replay"):
        for internals in ("keep", "replay"):
            ledger = RngLedger(defaults=False)
            stream = ledger.register(Stream("s", 5))
            x = X.clone().requires_grad_()
            runs.clear()
            product = Decision("replay", "replay", "replay")
            chunk = plan(product=product, residual=Decision("keep", internals, masks))
            with Tape(chunk, ledger, account=KeptBytes()) as tape:
                result = body(stream, x)
            kept = {name: nbytes for name, nbytes in tape.report().items() if name == "residual"}
            stream.draw()
            result.sin().sum().backward()
            assert stream.position == 2
            found[masks, internals] = (x.grad, kept, len(runs))
    grads = [grad for grad, _, _ in found.values()]
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert found["keep", "keep"][1:] == ({"residual": X.numel()}, 1)
    assert found["replay", "keep"][1:] == ({}, 1)
    assert found["replay", "replay"][1:] == ({}, 1)  # nothing was saved inside, so nothing is replayed
    assert found["keep", "replay"][1:] == ({"residual": X.numel()}, 1)  # a stored mask stays, and nothing is replayed


def test_extra_generator_that_the_ledger_does_not_know() -> None:
    """The fault of torch.utils.checkpoint: a replay draws other numbers from a generator that nobody restores.  A
    registered stream is drawn again exactly; numbers from an unknown generator show as a wrong gradient here, so the
    model draws from streams only."""
    known, unknown = Stream("s", 5), torch.Generator().manual_seed(5)
    ledger = RngLedger()
    ledger.register(known)
    x = numbers(4, 5).requires_grad_()

    def run(generator: object) -> torch.Tensor:
        x.grad = None
        used: list[torch.Tensor] = []

        def noisy(x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(4, 5, generator=generator.draw() if isinstance(generator, Stream) else generator)  # type: ignore[arg-type]
            used.append(noise)
            return (x * noise).exp()

        with Tape(plan(Decision("replay", "replay")), ledger):
            loss = step("a", noisy, x).sum()
        loss.backward()
        return (x.grad - used[0] * (x.detach() * used[0]).exp()).abs().max()

    assert run(known) < 1e-6 < run(unknown)
    torch.manual_seed(0)
    assert_same(lambda x: step("a", lambda x: torch.rand_like(x) * x.exp(), x), [X])


def test_draws_that_leave_no_trace_in_the_generator() -> None:
    """``fork_rng`` puts the state back, so before and after the step it is the same; the numbers came from it all the
    same, and in backward it stands elsewhere."""

    def forked(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return (x * torch.rand_like(x)).exp()

    def run(output: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(11)
        x = X.clone().requires_grad_()
        with Tape(plan(Decision(output, output))):
            y = step("a", forked, x)
            torch.rand(7)
            loss = step("b", torch.sin, y).sum()
        torch.rand(9)
        loss.backward()
        assert x.grad is not None
        return x.grad, torch.get_rng_state()

    kept, dropped = run("keep"), run("replay")
    assert torch.equal(kept[0], dropped[0]) and torch.equal(kept[1], dropped[1])
