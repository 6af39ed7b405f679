"""The training loop: what it learns, and that a run is a function of seed, data and number of steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slimformer.transformer import training
from slimformer.transformer.curves import CurvePoint
from slimformer.transformer.errors import InputError
from slimformer.transformer.parts import Part
from slimformer.transformer.processes import Processes
from slimformer.transformer.training import gradient_norms, products, train
from slimformer.transformer.training_options import TrainingOptions, learning_rate

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(12, 2)
Y = X @ torch.tensor([[2.0], [-1.0]], dtype=torch.float64) + 0.5


class Net(nn.Module):
    """A regression with dropout, so that the random state matters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(2, 1, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)

    def loss(self, batch: Sequence[int]) -> Tensor:
        share = batch.share if isinstance(batch, Part) else 1.0
        return share * (self.linear(self.dropout(X[list(batch)])) - Y[list(batch)]).square().mean()


def batches(epoch: int) -> list[list[int]]:
    """Five batches an epoch, of unequal size, in an order of its own."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[:3], order[3:4], order[4:8], order[8:10], order[10:]]


def weights(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def options(**changes: Any) -> TrainingOptions:
    return TrainingOptions(**{"steps": 12, "lr": 0.05, "warmup": 2, **changes})


def test_the_loss_falls() -> None:
    net = Net()
    log = train(net, batches, net.loss, options(steps=400))
    assert net.loss(range(12)).item() < 1e-3 < 1e-2 < log.losses[0]
    assert log.losses[-1] < 0.01 * log.losses[0]
    assert not net.training


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_the_log(steps: int) -> None:
    net = Net()
    log = train(net, batches, net.loss, options(steps=steps))
    sizes = [3, 1, 4, 2, 2] * 3
    assert (log.steps, log.texts, log.epochs) == (steps, sum(sizes[:steps]), math.ceil(steps / 5))
    assert len(log.losses) == steps
    assert log.to_dict() == {
        "steps": steps,
        "texts": log.texts,
        "epochs": log.epochs,
        "seconds": log.seconds,
        "losses": log.losses,
        "without_gradient": (),
    }


def test_the_log_keeps_twenty_means() -> None:
    values = iter(range(1, 41))
    net = Net()
    log = train(net, batches, lambda batch: net.loss(batch) * 0 + next(values), options(steps=40))
    assert log.losses == tuple(2 * i + 1.5 for i in range(20))


def test_the_curve_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step of ten and the last: mean losses since, the rate of the step, norms before clipping."""
    monkeypatch.setattr(training, "CURVE_POINTS", 4)
    net, watched, losses, norms = Net(), list[CurvePoint](), list[float](), list[float]()

    def loss(batch: Sequence[int]) -> Tensor:
        value = net.loss(batch)
        losses.append(float(value.detach()))
        gradients = torch.autograd.grad(value, list(net.parameters()), retain_graph=True)
        norms.append(math.sqrt(sum(float(one.square().sum()) for one in gradients)))
        return value

    how = options(steps=10, clip=1e-3)
    log = train(net, batches, loss, how, watch=watched.append)
    assert [point.step for point in log.curve] == [3, 6, 9, 10]
    assert list(log.curve) == watched
    for point, first in zip(log.curve, (0, 3, 6, 9), strict=True):
        assert point.loss == pytest.approx(sum(losses[first : point.step]) / (point.step - first))
        assert point.lr == learning_rate(point.step - 1, 10, how)
        assert point.gradients == pytest.approx({"linear": norms[point.step - 1]}, rel=1e-6)
    assert "curve" not in log.to_dict()


def test_gradients_are_told_apart_by_layer() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))])
            self.tables = nn.ModuleDict({"tokens": nn.Embedding(3, 2), "unused": nn.Embedding(3, 2)})
            self.bias = nn.Parameter(torch.zeros(1))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Part()

    for whole, prefix in ((Part(), ""), (Whole(), "inner.")):
        part = getattr(whole, "inner", whole)
        (part.encoder[1](part.encoder[0](part.tables["tokens"](torch.tensor([1])))) + 3 * part.bias).sum().backward()
        found = gradient_norms(whole)
        names = ["encoder.0", "encoder.1", f"{prefix}tables", prefix.rstrip(".") or "bias"]
        assert sorted(found) == sorted(names)
        last = part.encoder[1][0]
        expected = math.sqrt(float(last.weight.grad.square().sum() + last.bias.grad.square().sum()))
        assert found["encoder.1"] == pytest.approx(expected)
        assert found[names[3]] == pytest.approx(3)


def test_accumulated_batches_equal_one_batch_of_both() -> None:
    apart, together = Net(), Net()
    parts, whole = [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9]], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    one = train(apart, lambda _: parts, apart.loss, options(accumulate=2))
    two = train(together, lambda _: whole, together.loss, options())
    for a, b in zip(weights(apart), weights(together), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert one.losses == pytest.approx(two.losses, abs=1e-6)
    assert (one.texts, one.epochs) == (two.texts, two.epochs) == (60, 6)


def test_the_last_group_of_an_epoch_may_be_short() -> None:
    seen: list[list[int]] = []
    net = Net()

    def loss(batch: list[int]) -> Tensor:
        seen.append(list(batch))
        return net.loss(batch)

    log = train(net, lambda _: [[0], [1], [2]], loss, options(steps=4, accumulate=2))
    assert seen == [[0], [1], [2], [0], [1], [2]]
    assert (log.texts, log.epochs) == (6, 2)


def test_adamw_by_hand() -> None:
    """Two steps on one weight, from Loshchilov & Hutter 2019, algorithm 2."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, 3.0)
    train(net, lambda _: [[0]], lambda _: 0.1 * net.weight.square().sum(), options(steps=2, warmup=0, weight_decay=0.1))
    value, first, second = 3.0, 0.0, 0.0
    for step in (1, 2):
        rate, slope = 0.05 * (3 - step) / 2, 0.2 * value
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        value -= rate * 0.1 * value
        value -= rate * first / (1 - 0.9**step) / (math.sqrt(second / (1 - 0.999**step)) + 1e-8)
    assert net.weight.item() == pytest.approx(value, rel=1e-9)


def test_only_matrices_decay() -> None:
    net = nn.Linear(2, 2, dtype=torch.float64)
    nn.init.ones_(net.weight)
    nn.init.ones_(net.bias)
    train(net, lambda _: [[0]], lambda _: 0 * (net.weight.sum() + net.bias.sum()), options(steps=1, weight_decay=0.3))
    assert net.weight.flatten().tolist() == pytest.approx([1 - 0.05 * 0.3] * 4)
    assert net.bias.tolist() == [1.0, 1.0]


def test_what_does_not_learn_stays() -> None:
    net = Net()
    net.linear.bias.requires_grad_(False)
    before = weights(net)
    train(net, batches, net.loss, options())
    assert torch.equal(net.linear.bias, before[1])
    assert not torch.equal(net.linear.weight, before[0])


@pytest.mark.parametrize(("clip", "scale"), [(0.01, 1.0), (1.0, 1e3), (1e9, 1.0)])
def test_gradients_are_clipped(clip: float, scale: float) -> None:
    norms: list[float] = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = [p.grad.square().sum() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(found).sum().sqrt()))

    net = Net()
    handle = register_optimizer_step_pre_hook(record)
    try:
        train(net, batches, lambda batch: scale * net.loss(batch), options(clip=clip, steps=4))
    finally:
        handle.remove()
    assert len(norms) == 4
    if clip < 1e9:
        assert norms == pytest.approx([clip] * 4, rel=1e-3)
    else:
        assert all(0.1 < norm < 100 for norm in norms)


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        (100, 50, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.5, 99: 1 / 90}),  # at most a tenth of all steps
        (100, 4, {0: 0.25, 3: 1.0, 4: 1.0, 52: 0.5, 99: 1 / 96}),
        (10, 0, {0: 1.0, 5: 0.5, 9: 0.1}),
        (1, 50, {0: 1.0}),
    ],
)
def test_learning_rate_by_hand(steps: int, warmup: int, expected: dict[int, float]) -> None:
    chosen = TrainingOptions(lr=0.2, steps=steps, warmup=warmup)
    for step, share in expected.items():
        assert learning_rate(step, steps, chosen) == pytest.approx(0.2 * share)
    rates = [learning_rate(step, steps, chosen) for step in range(steps)]
    assert 0 < min(rates) <= max(rates) <= 0.2 * (1 + 1e-9)


def test_inverse_square_root_by_hand() -> None:
    """Vaswani et al. 2017, equation 3, scaled to its peak: min(s / w, sqrt(w / s)) at step s from 1 on."""
    chosen = TrainingOptions(lr=0.2, steps=1000, warmup=50, schedule="inverse_sqrt")
    for step in (0, 10, 48, 49, 50, 199, 999):
        share = min((step + 1) / 50, (50 / (step + 1)) ** 0.5)
        assert learning_rate(step, 1000, chosen) == pytest.approx(0.2 * share)


def jumping(saves: set[int], step: list[int]) -> Callable[[], float]:
    """A clock on which a minute and more passes at the steps whose end is to be saved."""
    return lambda: 100.0 * sum(1 for at in saves if step[0] >= at)


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


def until(net: Net, step: list[int], accumulate: int, fatal: int | None) -> Callable[[list[int]], Tensor]:
    """The net's loss; counts optimizer steps in `step` and dies in step `fatal`."""
    calls = [0]

    def loss(batch: list[int]) -> Tensor:
        calls[0] += 1
        step[0] = calls[0] // accumulate
        if fatal is not None and calls[0] > fatal * accumulate:
            raise Killed
        return net.loss(batch)

    return loss


@pytest.mark.parametrize(("fatal", "saves"), [(0, set()), (3, set()), (4, {2}), (5, {5}), (9, {2, 7}), (11, {10})])
def test_killed_and_resumed_is_the_same_run(fatal: int, saves: set[int], tmp_path: Path) -> None:
    """At every place: before the first save, inside an epoch, at its end, in a later one; with dropout."""
    whole = Net(dropout=0.3)
    expected = train(whole, batches, whole.loss, options())
    first, step = Net(dropout=0.3), [0]
    path = tmp_path / "state.pt"
    with pytest.raises(Killed):
        train(
            first,
            batches,
            until(first, step, 1, fatal),
            options(),
            state_path=path,
            clock=jumping(saves, step),
        )
    saved = torch.load(path, weights_only=True)
    assert saved["step"] == max(saves, default=0)
    torch.manual_seed(99)
    second, counted = Net(dropout=0.3), []
    log = train(second, batches, lambda batch: counted.append(batch) or second.loss(batch), options(), state_path=path)
    assert len(counted) == 12 - saved["step"]
    assert equal(weights(second), weights(whole))
    for name in ("steps", "texts", "epochs", "losses", "curve"):
        assert getattr(log, name) == getattr(expected, name), name
    assert list(tmp_path.iterdir()) == [path]


def test_resumed_with_accumulation_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    whole, first, second = Net(0.3), Net(0.3), Net(0.3)
    chosen = options(accumulate=2, steps=8)
    train(whole, batches, whole.loss, chosen)
    step, path = [0], tmp_path / "state.pt"
    with pytest.raises(Killed):
        train(first, batches, until(first, step, 2, 4), chosen, state_path=path, clock=jumping({3}, step))
    train(second, batches, second.loss, chosen, state_path=path)
    assert equal(weights(second), weights(whole))


def test_a_finished_run_is_taken_up_without_a_step(tmp_path: Path) -> None:
    net, again = Net(), Net()
    log = train(net, batches, net.loss, options(), state_path=tmp_path / "state.pt")
    second = train(
        again, batches, lambda _: pytest.fail("no step is left"), options(), state_path=tmp_path / "state.pt"
    )
    assert equal(weights(again), weights(net))
    assert second.losses == log.losses


def test_the_seed_decides() -> None:
    results = []
    for seed in (1, 1, 2):
        net = Net(dropout=0.5)
        train(net, batches, net.loss, options(seed=seed))
        results.append(weights(net))
    assert equal(results[0], results[1])
    assert not equal(results[0], results[2])


class Slow:
    """A clock that the loss moves on: 30 seconds for the first two batches, 2 for every later one."""

    def __init__(self, later: float = 2.0) -> None:
        self.now, self.calls, self.later = 0.0, 0, later

    def __call__(self) -> float:
        return self.now

    def loss(self, net: Net) -> Callable[[list[int]], Tensor]:
        def slowly(batch: list[int]) -> Tensor:
            self.calls += 1
            self.now += 30.0 if self.calls <= 2 else self.later
            return net.loss(batch)

        return slowly


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 27), (3, 9)])
def test_minutes_become_steps(accumulate: int, steps: int) -> None:
    net, clock = Net(), Slow()
    chosen = TrainingOptions(minutes=1, lr=0.05, accumulate=accumulate)
    log = train(net, batches, clock.loss(net), chosen, clock=clock)
    assert log.steps == steps  # 60 s / (1.1 * 2 s for each batch of a step)
    twin = Net()
    train(twin, batches, twin.loss, options(steps=steps, accumulate=accumulate, warmup=50))
    assert equal(weights(net), weights(twin))  # timing learnt nothing and used no random number
    assert log.seconds == pytest.approx(2.0 * (clock.calls - 5))


def test_timing_leaves_buffers_as_they_were() -> None:
    """Ranges that move with the batches are buffers."""
    net, clock = Net(), Slow()
    net.register_buffer("seen", torch.zeros(()))
    timed = clock.loss(net)

    def counted(batch: list[int]) -> Tensor:
        net.seen += 1
        return timed(batch)

    log = train(net, batches, counted, TrainingOptions(minutes=1), clock=clock)
    assert net.seen == log.steps == clock.calls - 5


def test_a_budget_under_one_step_is_one_step() -> None:
    net, clock = Net(), Slow(later=1000.0)
    assert train(net, batches, clock.loss(net), TrainingOptions(minutes=0.1), clock=clock).steps == 1


def test_a_resumed_budget_keeps_its_steps(tmp_path: Path) -> None:
    whole, clock = Net(), Slow()
    train(whole, batches, clock.loss(whole), TrainingOptions(minutes=1), clock=clock)
    first, clock, path = Net(), Slow(), tmp_path / "state.pt"

    def mortal(batch: list[int]) -> Tensor:
        if clock.calls == 20:
            raise Killed
        return clock.loss(first)(batch)

    with pytest.raises(Killed):
        train(first, batches, mortal, TrainingOptions(minutes=1), clock=clock, state_path=path)
    second, slower = Net(), Slow(later=50.0)
    log = train(second, batches, slower.loss(second), TrainingOptions(minutes=1), clock=slower, state_path=path)
    assert log.steps == 27
    assert equal(weights(second), weights(whole))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step(bad: float) -> None:
    net, kept, step = Net(), [], [0]

    def loss(batch: list[int]) -> Tensor:
        step[0] += 1
        kept[:] = weights(net)
        return net.loss(batch) * (bad if step[0] == 4 else 1)

    with pytest.raises(InputError, match=rf"the loss is {bad} at step 4; lower the learning rate 0.05"):
        train(net, batches, loss, options())
    assert equal(weights(net), kept)


@pytest.mark.parametrize(("precision", "within"), [("float32", "highest"), ("bfloat16", "medium")])
def test_precision_is_set_for_forwards_and_backwards_alone(precision: str, within: str) -> None:
    found: list[str] = []

    class Noted(torch.autograd.Function):
        """The identity, which notes the precision both ways."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            found.append(torch.get_float32_matmul_precision())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            found.append(torch.get_float32_matmul_precision())
            return gradients[0]

    net = Net()
    before = torch.get_float32_matmul_precision()
    train(net, batches, lambda batch: Noted.apply(net.loss(batch)), options(steps=2, precision=precision))  # type: ignore[no-untyped-call]
    assert found == [within] * 4
    assert torch.get_float32_matmul_precision() == before


def test_bfloat16_products_are_near_and_end_with_their_block() -> None:
    a, b = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).chunk(2)
    exact = a.double() @ b.double().T
    with products("bfloat16"):
        rounded = a @ b.T
    with pytest.raises(KeyError), products("bfloat16"):
        raise KeyError
    bound = 2 * 2**-8 * (a.abs().double() @ b.abs().double().T)  # each factor is off by half of 2^-8 at most, twice
    assert bool(((rounded - exact).abs() <= bound).all())
    assert torch.allclose((a @ b.T).double(), exact, atol=1e-4)


def test_nothing_to_train_on_is_said() -> None:
    for chosen in (options(), TrainingOptions(minutes=1)):
        net = Net()
        with pytest.raises(InputError, match="fine-tune: there is no text to train on"):
            train(net, lambda _: [], net.loss, chosen, title="fine-tune")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 1.0}, "give either minutes or steps"),
        ({"steps": None}, "give either minutes or steps"),
        ({"steps": 0}, "steps is 0, not at least 1"),
        ({"steps": None, "minutes": 0.0}, "minutes is 0.0, not above 0"),
        ({"steps": None, "minutes": math.inf}, "minutes is inf, not above 0"),
        ({"steps": None, "minutes": math.nan}, "minutes is nan, not above 0"),
        ({"lr": 0.0}, "lr is 0.0, not between 0 and 1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 1.5, "steps": -1}, "steps is -1.*lr is 1.5"),
        ({"precision": "float16"}, "precision is 'float16', not one of float32, bfloat16"),
        ({"schedule": "cosine"}, "schedule is 'cosine', not one of linear, inverse_sqrt"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"warmup": -1}, "warmup and weight_decay not below 0"),
        ({"clip": 0.0}, "clip above 0"),
        ({"clip": math.nan}, "clip above 0"),
        ({"weight_decay": -0.1}, "weight_decay not below 0"),
        ({"weight_decay": math.nan}, "weight_decay not below 0"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        options(**changes)
    assert str(caught.value).startswith("training: ")


class Listener:
    """A progress that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, title: str, total: int | None, unit: str) -> None:
        self.heard.append((title, total, unit))

    def advance(self, n: int = 1, note: str = "") -> None:
        self.heard.append(n)

    def done(self, note: str = "") -> None:
        self.heard.append("done")


def test_a_process_that_follows_learns_and_tells_nobody(tmp_path: Path) -> None:
    """The main one is told of epochs, points and steps, and keeps the state."""

    class Second(Processes):
        main = False

    def unwanted(*_: Any) -> None:
        pytest.fail("the second process told of its training")

    net, twin, listener = Net(), Net(), Listener()
    ways: dict[str, Any] = {"after_epoch": unwanted, "watch": unwanted, "progress": listener}
    log = train(net, batches, net.loss, options(), state_path=tmp_path / "state.pt", processes=Second(), **ways)
    train(twin, batches, twin.loss, options())
    assert equal(weights(net), weights(twin))
    assert log.steps == 12
    assert listener.heard == []
    assert not list(tmp_path.iterdir())


def test_progress_is_told_of_every_step(tmp_path: Path) -> None:
    net, step, path = Net(), [0], tmp_path / "state.pt"
    with pytest.raises(Killed):
        train(net, batches, until(net, step, 1, 4), options(steps=6), state_path=path, clock=jumping({3}, step))
    listener = Listener()
    train(net, batches, net.loss, options(steps=6), state_path=path, title="again", progress=listener)
    assert listener.heard == [("again", 6, "steps"), 3, 1, 1, 1, "done"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_state_of_other_options_is_refused(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(2, 1), tmp_path / "state.pt"

    def loss(batch: list[int]) -> torch.Tensor:
        return model(torch.ones(len(batch), 2)).square().mean()

    train(model, lambda epoch: [[0], [1]], loss, TrainingOptions(steps=2), state_path=path)
    with pytest.raises(InputError, match="of a training with other options"):
        train(model, lambda epoch: [[0], [1]], loss, TrainingOptions(steps=2, lr=1e-2), state_path=path)
