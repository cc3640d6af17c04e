"""Both drivers of an update: what is traced, compared, kept; real compilations, which take half a minute, are slow."""

from __future__ import annotations

import logging
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from outrider.agents import compilation, drivers
from outrider.agents.compilation import CannotCompile, Compilation, Compiled, Traceable, cache_dir
from outrider.agents.dqn import Dqn, DqnConfig
from outrider.agents.drivers import difference
from outrider.agents.flat import FlatAdam, FlatParameters
from outrider.agents.sac import SacConfig
from outrider.agents.tracing import CannotTrace, eager, state_tensors, trace
from outrider.agents.updating import UpdatingAgent
from outrider.core import EnvSpec
from outrider.data import Batch
from outrider.errors import ConfigError

SPEC = EnvSpec("Toy", spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
BOX_SPEC = EnvSpec("Toy", spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (2,)))
ROWS = 16


class NormConfig(DqnConfig):
    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        # no bias before the batch norm: its gradient is nothing but rounding
        return nn.Sequential(
            nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        )


class SpectralConfig(DqnConfig):
    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 2))


class TiedConfig(DqnConfig):
    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        layer = nn.Linear(8, 8)
        return nn.Sequential(nn.Linear(3, 8), layer, nn.Tanh(), layer, nn.Linear(8, 2))


class CriticNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)
        )

    def forward(self, obs: Tensor, act: Tensor) -> Tensor:
        return torch.stack([m(torch.cat((obs, act), 1)).squeeze(1) for m in self.members])


class SacNormConfig(SacConfig):
    def critic_module(self, obs_dim: int, act_dim: int) -> nn.Module:
        return CriticNorm()


SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": ROWS}
AGENTS: dict[str, Callable[[], UpdatingAgent]] = {
    "dqn": lambda: DqnConfig(**SMALL).build(SPEC),
    "dqn, single, mse, clipped": lambda: DqnConfig(double=False, loss="mse", max_grad_norm=0.01, **SMALL).build(SPEC),
    "dqn, duelling, not clipped": lambda: DqnConfig(dueling=True, max_grad_norm=None, **SMALL).build(SPEC),
    "dqn, norms": lambda: NormConfig(**SMALL).build(SPEC),
    "dqn, spectral norm": lambda: SpectralConfig(**SMALL).build(SPEC),
    "dqn, tied": lambda: TiedConfig(**SMALL).build(SPEC),
    "dqn, noisy": lambda: with_layer(Noisy).build(SPEC),
    "sac": lambda: SacConfig(**SMALL).build(BOX_SPEC),
    "sac, fixed alpha, clipped": lambda: SacConfig(alpha=0.3, max_grad_norm=0.1, **SMALL).build(BOX_SPEC),
    "sac, norms": lambda: SacNormConfig(**SMALL).build(BOX_SPEC),
}


def batch(seed: int, spec: EnvSpec = SPEC, *, weights: bool = False, rows: int = ROWS, **columns: Any) -> Batch:
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.standard_normal((2, rows, 3)).astype(np.float32)
    discrete = isinstance(spec.action_space, spaces.Discrete)
    act = rng.integers(2, size=rows) if discrete else rng.uniform(-2, 2, (rows, 2)).astype(np.float32)
    made = {"obs": obs, "act": act, "reward": rng.standard_normal(rows).astype(np.float32), "next_obs": next_obs}
    made |= {"terminated": rng.random(rows) < 0.2, "n_steps": rng.integers(1, 4, rows)} | columns
    return Batch(made, np.arange(rows), rng.random(rows).astype(np.float32) if weights else None)


def spec_of(agent: UpdatingAgent) -> EnvSpec:
    return SPEC if isinstance(agent, Dqn) else BOX_SPEC


def inputs(agent: UpdatingAgent, data: Batch) -> tuple[Tensor, ...]:
    """What a traced or compiled update takes."""
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in agent._noise_shapes(ROWS)]
    given = agent._drivers._fitting((*agent._batches(data), *noise))
    assert given is not None
    return given


def require_equal_updates(agent: UpdatingAgent, other: Callable[..., Any]) -> None:
    """After some updates, one more by the other driver gives the same moments, buffers and results."""
    spec = spec_of(agent)
    for i in range(5):
        agent.update(batch(i, spec))
    twin = agent.traceable()
    live = state_tensors(twin.parts)
    vectors = {id(part.vector) for part in twin.parts.values() if isinstance(part, FlatParameters)}
    for weights in (False, True):
        given = inputs(agent, batch(9, spec, weights=weights))
        before, copies = [t.clone() for t in live], [t.clone() for t in live]
        torch.manual_seed(5)
        expected = eager(twin.parts, twin.step)(given)
        torch.manual_seed(5)
        got = other(*copies, *given)
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)
        for tensor, copy in zip(live, copies, strict=True):
            if id(tensor) not in vectors:
                torch.testing.assert_close(copy, tensor, atol=1e-6, rtol=1e-5)
        assert difference(twin.parts, before, live, copies) is None
        assert not torch.equal(before[0], live[0])


def traced(agent: UpdatingAgent) -> Callable[..., Any]:
    twin = agent.traceable()
    return trace(twin.parts, twin.step, twin.inputs)


@pytest.mark.parametrize("name", AGENTS)
def test_the_traced_update_does_what_the_written_one_does(name: str) -> None:
    agent = AGENTS[name]()
    require_equal_updates(agent, traced(agent))


def test_tracing_leaves_the_agent_as_it_is() -> None:
    agent = AGENTS["dqn, norms"]()
    before = [t.clone() for t in state_tensors(agent._parts())]
    traced(agent)
    for a, b in zip(before, state_tensors(agent._parts()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_the_traced_update_leaves_out_what_is_not_finite_and_counts_it(name: str) -> None:
    agent = AGENTS[name]()
    agent.update(batch(0, spec_of(agent)))
    live = state_tensors(agent._parts())
    copies = [t.clone() for t in live]
    traced(agent)(*copies, *inputs(agent, batch(1, spec_of(agent), obs=np.full((ROWS, 3), np.nan, np.float32))))
    skipped = [id(part.skipped) for part in agent._parts().values() if isinstance(part, FlatAdam)]
    for tensor, copy in zip(live, copies, strict=True):
        assert torch.equal(copy, tensor + 1 if id(tensor) in skipped else tensor)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("mode", ["off", "on"])
def test_running_statistics_know_nothing_of_an_update_that_was_left_out(mode: str) -> None:
    Interpreted.graph = staticmethod(traced(NormConfig(**SMALL).build(SPEC)))  # type: ignore[assignment]
    agent = NormConfig(compile=mode, bad_updates="skip", **SMALL).build(SPEC)
    agent.prepare(never)
    for i in range(3):
        agent.update(batch(i))
    before = [t.clone() for t in state_tensors(agent._parts())]
    agent.update(batch(3, obs=np.full((ROWS, 3), 3e38, np.float32)))
    differ = [not torch.equal(a, b) for a, b in zip(before, state_tensors(agent._parts()), strict=True)]
    assert int(agent._adam.skipped) == sum(differ) == 1  # that counter alone
    agent.update(batch(4))
    assert not any(torch.equal(old, new) for old, new in zip(before[1:3], agent._online.tensors()[1:3], strict=True))


class Noisy(nn.Module):
    """A noisy layer (Fortunato et al. 2018) with a dropout, and every way to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.full((8, 8), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.randn(8), torch.rand(8, 1) - 0.5
        sigma = self.sigma * (1 + torch.randn_like(self.sigma.t()).t())  # drawn in the order of memory
        x = x + F.linear(F.relu(x), sigma * a * b) + torch.empty(8).normal_(0.0, 0.1)
        return F.dropout(x + 0.1 * torch.randn_like(x), 0.2, training=True)


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.sigmoid(x))


class DrawnBehindAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty(8)
        view = noise.view(2, 4)
        noise.normal_()
        return x + view.sum()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return x


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def with_layer(layer: Callable[[], nn.Module], **fields: Any) -> DqnConfig:
    class Config(DqnConfig):
        def network_module(self, env_spec: EnvSpec) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 8), layer(), nn.Linear(8, 2))

    return Config(**SMALL, **fields)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ByValue, "random numbers .*bernoulli"),
        (DrawnBehindAView, "random numbers .*normal_"),
        (Counting, "neither a parameter"),
    ],
)
def test_networks_that_are_no_functions_of_their_inputs_are_not_traced(
    layer: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(CannotTrace, match=reason):
        traced(with_layer(layer).build(SPEC))


def test_a_difference_in_any_tensor_is_found() -> None:
    agent = AGENTS["dqn, norms"]()
    parts = agent._parts()
    before = [t.clone() for t in state_tensors(parts)]
    for i in range(3):
        agent.update(batch(i))
    after = [t.clone() for t in state_tensors(parts)]
    names = [(name, i) for name, part in parts.items() for i in range(len(part.tensors()))]
    assert difference(parts, before, after, after) is None
    for i, (name, at) in enumerate(names):
        wrong = [t.clone() for t in after]
        wrong[i] = wrong[i] + 1
        assert str(difference(parts, before, after, wrong)).startswith(f"{name}, tensor {at}: off by 1")
        wrong[i] = torch.full_like(after[i].float(), np.nan)
        assert difference(parts, before, after, wrong) is not None


class Ready:
    """A compilation that is there at the third look, and gives the traced update."""

    looks = 0
    reason = ""
    building = False

    def __init__(self, make: Callable[[], Traceable]) -> None:
        self.closed = False

    def poll(self, timeout_s: float = 0.0) -> Compiled | None:
        Ready.looks += 1
        if Ready.looks < 3:
            return None
        if Ready.reason:
            raise CannotCompile(Ready.reason)
        return Compiled(Path("somewhere"), ())

    def close(self) -> None:
        self.closed = True


class Interpreted:
    """Runs the traced update in place of a compiled one."""

    graph: Callable[..., Any]
    pause_s = 0.0

    def __init__(self, made: Compiled, state: list[Tensor]) -> None:
        self.state = state

    def __call__(self, given: tuple[Tensor, ...]) -> list[Tensor]:
        return self.on(self.state, given)

    def on(self, state: list[Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
        time.sleep(Interpreted.pause_s)
        return list(Interpreted.graph(*state, *given))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "Compilation", Ready)
    monkeypatch.setattr(drivers, "CompiledUpdate", Interpreted)
    monkeypatch.setattr(drivers, "LOOKS_EVERY", 2)
    monkeypatch.setattr(Ready, "looks", 0)
    monkeypatch.setattr(Ready, "reason", "")
    Interpreted.graph = staticmethod(traced(DqnConfig(**SMALL).build(SPEC)))  # type: ignore[assignment]


def never() -> bool:
    return False


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("slow", ["eager", "compiled"])
def test_auto_keeps_the_faster_driver_and_says_so_once(
    slow: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent, plain = (DqnConfig(compile=mode, **SMALL).build(SPEC) for mode in ("auto", "off"))
    if slow == "compiled":
        monkeypatch.setattr(Interpreted, "pause_s", 0.003)
    else:
        written = agent._drivers._eager
        agent._drivers._eager = lambda given: [time.sleep(0.01), written(given)][1]
    with caplog.at_level(logging.INFO, "outrider"):
        agent.prepare(never)
        for i in range(120):
            agent.update(batch(i % 7))
            plain.update(batch(i % 7))
    choice = agent._drivers.choice
    assert choice.compiled == (slow == "eager")
    assert choice.ratio is not None
    assert (choice.ratio < 1) == choice.compiled
    assert len(caplog.records) == 1
    assert f"{choice.ratio:.2f} of the eager time" in caplog.text
    assert agent.update(batch(0), with_record=True).record["train/compiled"] == int(choice.compiled)
    assert "train/compiled" not in plain.update(batch(0), with_record=True).record
    # nothing was lost or done twice while the drivers changed places
    torch.testing.assert_close(agent._online.vector, plain._online.vector, atol=1e-4, rtol=1e-4)
    assert agent.state_dict()["adam"]["step"] == plain.state_dict()["adam"]["step"] == 121


@pytest.mark.usefixtures("fake")
def test_on_is_compiled_from_the_first_update() -> None:
    agent = DqnConfig(compile="on", **SMALL).build(SPEC)
    agent.prepare(never)
    agent._drivers._eager = eager_once(agent)
    for i in range(5):
        agent.update(batch(i))
    assert agent._drivers.choice == (True, None)


def eager_once(agent: Dqn) -> Callable[[Any], Any]:
    """The written update, for the comparison alone."""
    left, written = [None], agent._drivers._eager

    def run(given: Any) -> Any:
        left.pop()
        return written(given)

    return run


@pytest.mark.usefixtures("fake")
def test_a_run_with_on_that_is_resumed_goes_on_bit_for_bit() -> None:
    whole, first, second = (DqnConfig(compile="on", **SMALL).build(SPEC, seed=s) for s in (0, 0, 1))
    for agent in (whole, first, second):
        agent.prepare(never)
    for i in range(10):
        whole.update(batch(i))
    for i in range(5):
        first.update(batch(i))
    second.load_state_dict(first.state_dict())
    for i in range(5, 10):
        second.update(batch(i))
    assert torch.equal(second._online.vector, whole._online.vector)


@pytest.mark.usefixtures("fake")
def test_a_batch_of_another_size_is_updated_as_it_is_written() -> None:
    agent, plain = (DqnConfig(compile=mode, **SMALL).build(SPEC) for mode in ("on", "off"))
    agent.prepare(never)
    agent.update(batch(0))
    plain.load_state_dict(agent.state_dict())
    for each in (agent, plain):
        each.update(batch(1, rows=5))
    assert torch.equal(agent._online.vector, plain._online.vector)


@pytest.mark.usefixtures("fake")
def test_a_compiled_update_that_does_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    Interpreted.graph = staticmethod(  # type: ignore[assignment]
        traced(DqnConfig(max_grad_norm=0.001, **SMALL).build(SPEC))
    )
    agent, plain = (DqnConfig(compile=mode, **SMALL).build(SPEC) for mode in ("auto", "off"))
    agent.prepare(never)
    for i in range(20):
        agent.update(batch(i))
        plain.update(batch(i))
    assert [r.message for r in caplog.records if "compiled, it does something else" in r.message]
    assert torch.equal(agent._online.vector, plain._online.vector)
    strict = DqnConfig(compile="on", **SMALL).build(SPEC)
    strict.prepare(never)
    with pytest.raises(ConfigError, match=r"^agent\.compile: expected a compiled update that does"):
        strict.update(batch(0))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("building", [True, False])
def test_who_waits_for_a_compilation_is_told_unless_it_was_made_before(
    building: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "my-compiler")
    monkeypatch.setattr(Ready, "building", building)
    DqnConfig(compile="on", **SMALL).build(SPEC).prepare(never)
    begun, ended = "the update is being compiled with my-compiler", "compiled in 0 s"
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("outrider: agent.compile: ") for line in said] == [True] * 2 * building
    assert [text in line for text, line in zip((begun, ended), said, strict=False)] == [True] * 2 * building


@pytest.mark.usefixtures("fake")
def test_what_cannot_be_compiled_runs_as_it_is_written_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ready, "reason", "there is no C++ compiler")
    agent = DqnConfig(compile="auto", **SMALL).build(SPEC)
    agent.prepare(never)
    for i in range(20):
        agent.update(batch(i))
    assert [r.message for r in caplog.records] == [
        "the update runs as it is written, not compiled (agent.compile: auto): there is no C++ compiler"
    ]
    strict = DqnConfig(compile="on", **SMALL).build(SPEC)
    with pytest.raises(ConfigError, match=r"^agent\.compile: expected .*, got there is no C\+\+ compiler$"):
        strict.prepare(never)


@pytest.mark.usefixtures("fake")
def test_waiting_for_a_compilation_can_be_given_up() -> None:
    agent = DqnConfig(compile="on", **SMALL).build(SPEC)
    agent.prepare(lambda: True)
    assert Ready.looks == 1
    compilation = agent._drivers._compilation
    agent.close()
    assert compilation.closed


def test_a_directory_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_dir()
    assert path == tmp_path / "outrider" / "compiled"
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    with pytest.raises(PermissionError, match=r"chmod 700"):
        cache_dir()
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="expected a directory of this user"):
        cache_dir()


def test_damaged_files_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    assert not compilation._intact(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("code", b"x" * 10_000)
    assert compilation._intact(path)
    data = bytearray(path.read_bytes())
    data[5_000] ^= 1
    path.write_bytes(data)
    assert not compilation._intact(path)
    path.write_bytes(data[:6_000])
    assert not compilation._intact(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "compiled"


def finished(make: Callable[[], Traceable]) -> Compiled:
    running = Compilation(make)
    try:
        made = None
        while made is None:  # pytest has a time-out
            made = running.poll(0.1)
        return made
    finally:
        running.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (with_layer(ByValue), "a network draws random numbers"),
        (with_layer(Deciding), "GuardOnDataDependentSymNode|control flow|data-dependent|item"),
        (DqnConfig(**SMALL), "expected a C\\+\\+ compiler, got no program 'no-such-compiler'"),
    ],
)
def test_the_compiling_process_says_in_a_line_why_it_cannot(
    config: DqnConfig, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    agent = config.build(SPEC)
    with pytest.raises(CannotCompile, match=reason) as error:
        finished(agent._drivers._twin)
    assert "\n" not in str(error.value)
    assert [path.name for path in cache.iterdir()] == ["failed.log"], "nothing else is left"


def test_a_compilation_that_is_closed_leaves_nothing(cache: Path) -> None:
    running = Compilation(DqnConfig(**SMALL).build(SPEC)._drivers._twin)
    pid = running._process.pid
    running.close()
    running.close()
    assert list(cache.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SLOW = ("dqn, norms", "dqn, spectral norm", "dqn, noisy", "sac")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_the_compiled_update_does_what_the_written_one_does(name: str, cache: Path) -> None:
    agent = AGENTS[name]()
    made = finished(agent._drivers._twin)
    assert cache.stat().st_mode & 0o077 == 0
    require_equal_updates(agent, lambda *given: drivers.CompiledUpdate(made, list(given))(()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_result_is_found_again_and_a_damaged_one_is_made_anew(cache: Path) -> None:
    twin = AGENTS["dqn"]()._drivers._twin
    path = finished(twin).path
    made = path.stat()
    assert finished(twin).path == path
    assert path.stat().st_ino == made.st_ino
    path.write_bytes(path.read_bytes()[:10_000])
    assert finished(twin).path == path
    assert path.stat().st_size == pytest.approx(made.st_size, rel=0.01)
    assert finished(DqnConfig(lr=1e-4, **SMALL).build(SPEC)._drivers._twin).path == path, "rates are arguments"
