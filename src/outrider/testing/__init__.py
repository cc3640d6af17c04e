"""For tests: toy environments that prove what became of their steps, fakes, and a check for each contract.

Each check raises ``AssertionError`` with a plain sentence::

    from outrider.testing import check_env_config
    check_env_config(MyEnvConfig())
"""

from outrider.testing.contracts import (
    check_agent_config,
    check_env_config,
    check_evaluator,
    check_recorder,
    check_replay_buffer_config,
    check_step_processor_config,
)
from outrider.testing.environments import (
    CountEnv,
    FailingEnv,
    Pow2Env,
    SpacesEnv,
    TagEnv,
    TermEnv,
    vector_count_env,
    vector_tag_env,
)
from outrider.testing.fakes import FakeAgent, FakeAgentConfig, FakePolicy, ListBuffer, RowsBuffer, random_rows

__all__ = [
    "CountEnv",
    "FailingEnv",
    "FakeAgent",
    "FakeAgentConfig",
    "FakePolicy",
    "ListBuffer",
    "Pow2Env",
    "RowsBuffer",
    "SpacesEnv",
    "TagEnv",
    "TermEnv",
    "check_agent_config",
    "check_env_config",
    "check_evaluator",
    "check_recorder",
    "check_replay_buffer_config",
    "check_step_processor_config",
    "random_rows",
    "vector_count_env",
    "vector_tag_env",
]
