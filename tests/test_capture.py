"""Updates as CUDA graphs: all but the recording itself without a GPU, which `test_on_a_gpu` needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from outrider.agents import drivers
from outrider.agents.capture import CapturedUpdate
from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.agents.tracing import state_tensors
from outrider.agents.updating import UpdatingAgent
from outrider.core import EnvSpec
from outrider.data import Batch
from outrider.errors import ConfigError
from outrider.sampling import transition_layout
from outrider.testing import random_rows

ROWS = 16
SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": ROWS}
OBS = spaces.Box(-1, 1, (3,))
SPECS = {
    DqnConfig: EnvSpec("Toy", OBS, spaces.Discrete(2)),
    SacConfig: EnvSpec("Toy", OBS, spaces.Box(-1, 1, (2,))),
}


def batch(spec: EnvSpec, seed: int, rows: int = ROWS) -> Batch:
    return Batch(random_rows(transition_layout(spec), rows, env_spec=spec, seed=seed), np.arange(rows))


def never() -> bool:
    return False


def again(function: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a recording: a warm-up, and the same once more for each replay."""
    function()
    return function


def without_gpu(monkeypatch: pytest.MonkeyPatch, record: Any, config: DqnConfig | SacConfig) -> UpdatingAgent:
    """An agent on the CPU whose updates are recorded as they would be on a GPU."""
    monkeypatch.setattr(drivers, "CapturedUpdate", partial(CapturedUpdate, record=record))
    agent = config.build(SPECS[type(config)])
    agent._drivers._on_cpu = False
    agent.prepare(never)
    return agent


@pytest.mark.parametrize("kind", [DqnConfig, SacConfig])
def test_a_replayed_update_is_the_written_one(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = without_gpu(monkeypatch, again, kind(compile="on", **SMALL))
    plain = kind(**SMALL).build(SPECS[kind])
    for i in range(5):
        rows = batch(SPECS[kind], i, ROWS if i != 3 else 7)  # other shapes run as they are written
        a, b = agent.update(rows), plain.update(rows)
        torch.testing.assert_close(a.td_errors, b.td_errors)
    assert agent._drivers.choice.compiled
    for mine, other in zip(state_tensors(agent._parts()), state_tensors(plain._parts()), strict=True):
        assert torch.equal(mine, other)


def test_an_update_that_cannot_be_recorded_runs_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(function: Callable[[], None]) -> Callable[[], None]:
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    config = DqnConfig(compile="auto", **SMALL)
    agent, plain = without_gpu(monkeypatch, fails, config), DqnConfig(**SMALL).build(SPECS[DqnConfig])
    for i in range(3):
        rows = batch(SPECS[DqnConfig], i)
        agent.update(rows)
        plain.update(rows)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].message.endswith("CUDA graph: operation not permitted when stream is capturing")
    assert torch.equal(agent._acting.vector, plain._acting.vector)

    strict = without_gpu(monkeypatch, fails, DqnConfig(compile="on", **SMALL))
    with pytest.raises(ConfigError, match=r"^agent\.compile: .*operation not permitted"):
        strict.update(batch(SPECS[DqnConfig], 0))


def test_a_recording_that_does_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = without_gpu(monkeypatch, lambda function: lambda: None, DqnConfig(compile="auto", **SMALL))
    plain = DqnConfig(**SMALL).build(SPECS[DqnConfig])
    for i in range(2):
        rows = batch(SPECS[DqnConfig], i)
        agent.update(rows)
        plain.update(rows)
    assert not agent._drivers.choice.compiled
    assert torch.equal(agent._acting.vector, plain._acting.vector)
    assert "it cannot be a CUDA graph: " in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [DqnConfig, SacConfig])
def test_on_a_gpu(kind: Any) -> None:
    spec = SPECS[kind]
    agent, plain = (kind(device="cuda", compile=mode, **SMALL).build(spec) for mode in ("on", "off"))
    agent.prepare(never)
    for i in range(50):
        rows = batch(spec, i)
        a, b = agent.update(rows), plain.update(rows)
        torch.testing.assert_close(a.td_errors, b.td_errors, atol=1e-3, rtol=1e-3)
    assert agent._drivers.choice.compiled
    torch.testing.assert_close(agent._acting.vector, plain._acting.vector, atol=1e-3, rtol=1e-2)
    agent.sample(np.zeros((2, 3), np.float32))
