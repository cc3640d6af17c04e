from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from outrider.config import Config, Family, require
from outrider.errors import ConfigError
from outrider.strict_yaml import dump_yaml, parse_yaml

HERE = __name__


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    lr: float = 3e-4
    name: str = "adam"

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", "a positive number", self.lr)


@dataclass(frozen=True, kw_only=True)
class Other(Config):
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature", "a positive number", self.temperature)


@dataclass(frozen=True, kw_only=True)
class Outer(Config):
    capacity: int
    gamma: float = 0.99
    sizes: tuple[int, ...] = (64, 64)
    explorer: Literal["epsilon", "softmax"] = "epsilon"
    double: bool = True
    device: str | None = None
    entropy: float | Literal["auto"] = "auto"
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    either: Inner | Other = field(default_factory=Inner)
    kwargs: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("runs")


@dataclass(frozen=True)
class Plain:
    gain: float
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.gain == 0:
            raise ValueError("gain must not be zero")


class NoDataclass:
    pass


CHILDREN = Family({"inner": f"{HERE}:Inner", "gone": "no_such_module_at_all:X"}, default="inner")
REQUIRED = Family({"inner": f"{HERE}:Inner", "outer": f"{HERE}:Outer"})


@dataclass(frozen=True, kw_only=True)
class Holder(Config):
    child: Annotated[Any, CHILDREN] = field(default_factory=CHILDREN.build_default)
    other: Annotated[Any, REQUIRED] | None = None


def refusal(build: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    text = str(caught.value)
    assert "\n" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    return text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "capacity: expected a value, got nothing"),
        ({"capacity": "3"}, "capacity: expected an integer, got '3'"),
        ({"capacity": True}, "capacity: expected an integer, got true"),
        ({"capacity": 3.0}, "capacity: expected an integer, got 3.0"),
        ({"capacity": None}, "capacity: expected an integer, got null"),
        ({"gamma": True}, "gamma: expected a number, got true"),
        ({"gamma": "high"}, "gamma: expected a number, got 'high'"),
        ({"double": 1}, "double: expected true or false, got 1"),
        ({"sizes": 64}, "sizes: expected a list, got 64"),
        ({"sizes": [64, "a"]}, "sizes.1: expected an integer, got 'a'"),
        ({"explorer": "epsilom"}, "explorer: expected one of epsilon, softmax, got 'epsilom'"),
        ({"device": 3}, "device: expected a string, got 3"),
        ({"entropy": "no"}, "entropy: expected a number or auto, got 'no'"),
        ({"inner": {"lr": "x"}}, "inner.lr: expected a number, got 'x'"),
        ({"inner": {"lr": -1}}, "inner.lr: expected a positive number, got -1.0"),
        ({"inner": 3}, "inner: expected a mapping of keys to values, got 3"),
        ({"maybe": {"lr": -1}}, "maybe.lr: expected a positive number, got -1.0"),
        ({"maybe": {"lrr": 1}}, "maybe.lrr: expected one of lr, name, got an unknown key (did you mean lr?)"),
        ({"maybe": {"lr": "x"}}, "maybe.lr: expected a number, got 'x'"),
        ({"either": {"temperature": -1}}, "either.temperature: expected a positive number, got -1.0"),
        ({"either": {"temperature": "x"}}, "either.temperature: expected a number, got 'x'"),
        ({"either": {"lr": 0}}, "either.lr: expected a positive number, got 0.0"),
        ({"either": {"zzz": 0}}, "either.zzz: expected one of lr, name or one of temperature, got an unknown key"),
        ({"inner": {"nome": "x"}}, "inner.nome: expected one of lr, name, got an unknown key (did you mean name?)"),
        ({"kwargs": [1]}, "kwargs: expected a mapping, got [1]"),
        ({"path": 3}, "path: expected a string, got 3"),
        ({"capacity": object()}, "capacity: expected a number, string, list, mapping, null or config, got a object"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_its_dotted_key(data: dict[str, Any], message: str) -> None:
    whole = data if "capacity" in data or not data else {"capacity": 1, **data}
    assert refusal(lambda: Outer.from_dict(whole)) == message


def test_an_unknown_key_names_the_known_ones_and_the_nearest() -> None:
    text = refusal(lambda: Outer.from_dict({"capacity": 1, "gama": 0.9}))
    assert text.startswith("gama: expected one of capacity, gamma, sizes, ")
    assert text.endswith("got an unknown key (did you mean gamma?)")
    assert "did you mean" not in refusal(lambda: Outer.from_dict({"capacity": 1, "zzz": 0.9}))


def test_keys_are_seen_from_where_the_section_stands() -> None:
    assert refusal(lambda: Outer.from_dict({"capacity": []}, where="a.b")).startswith("a.b.capacity: ")
    assert refusal(lambda: Outer.from_dict([], where="a.b")).startswith("a.b: expected a mapping")  # type: ignore[arg-type]


def test_an_integer_is_a_number_and_a_list_a_tuple() -> None:
    config = Outer.from_dict({"capacity": 1_000, "gamma": 1, "sizes": [], "entropy": 0})
    assert (config.gamma, type(config.gamma)) == (1.0, float)
    assert config.sizes == ()
    assert config.entropy == 0


def test_plain_values_from_python_are_taken_like_those_from_yaml() -> None:
    config = Outer.from_dict({"capacity": np.int64(5), "gamma": np.float64(0.5), "sizes": (1, 2), "path": Path("x")})
    assert config == Outer(capacity=5, gamma=0.5, sizes=(1, 2), path=Path("x"))
    assert Outer.from_dict({"capacity": 1, "inner": Inner(lr=2.0), "maybe": Inner(lr=3.0)}).maybe == Inner(lr=3.0)


@pytest.mark.parametrize(
    "config",
    [
        Outer(capacity=1),
        Outer(
            capacity=10**12,
            gamma=math.inf,
            sizes=(1,),
            explorer="softmax",
            double=False,
            device="3e-4",
            entropy=1e-7,
            inner=Inner(lr=1e-30, name="no"),
            maybe=Inner(name="12:30"),
            either=Other(temperature=2.0),
            kwargs={"a": {"b": [1, {"c": None}], "d": "0x10"}, "e": "", "f": "null", "on": "~", "g": "a: b # c"},
            path=Path("/tmp/a b"),
        ),
    ],
)
def test_a_saved_config_loads_as_an_equal_one(config: Outer, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config.save(path)
    assert Outer.load(path) == config
    assert Outer.from_dict(config.to_dict()) == config
    assert path.read_text().startswith("format_version: 1\n")
    assert "maybe:" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_failed_save_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    Outer(capacity=1).save(path)

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        Outer(capacity=2).save(path)
    assert Outer.load(path).capacity == 1
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capacity: 1\ncapacity: 2\n", "capacity: expected a key once, got it a second time (line 2)"),
        ("inner: {lr: 1, lr: 2}\n", "inner.lr: expected a key once, got it a second time (line 1) (in PATH)"),
        ("- 1\n", "PATH: expected a mapping of keys to values, got a list"),
        ("1: 2\n", "PATH: expected keys that are strings, got 1 (line 1)"),
        (
            "a: [1\n",
            "PATH: expected valid YAML, got an error in line 2, column 1: expected ',' or ']', but got ",
        ),
        (
            "a: !!python/name:os.system\n",
            "PATH: expected valid YAML, got an error in line 1, column 4: could not ",
        ),
        ("a: &a {b: *a}\n", "PATH: expected valid YAML, got an error in line 1, column 4: found unconstructable "),
        ("a: " + 5000 * "[" + 5000 * "]", "PATH: expected YAML that is not nested that deeply, got too many levels"),
        ("format_version: 2\n", "format_version: expected 1, got 2"),
        ("capacity: x\n", "capacity: expected an integer, got 'x' (in PATH)"),
        ("", "capacity: expected a value, got nothing (in PATH)"),
    ],
)
def test_a_file_that_is_no_such_config_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert refusal(lambda: Outer.load(path)).startswith(message.replace("PATH", str(path)))


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    assert refusal(lambda: Outer.load(path)) == f"{path}: expected a YAML file, got no file at that path"
    assert refusal(lambda: Outer.load(tmp_path)).startswith(f"{tmp_path}: expected a readable YAML file, got ")
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(lambda: Outer.load(path)).startswith(f"{path}: expected a readable YAML file, got ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E6", 1e6),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("-3", -3),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("", None),
        ("~", None),
        ("'3'", "3"),
        ("1.2.3", "1.2.3"),
        ("-", [None]),
        ("CartPole-v1", "CartPole-v1"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_has_them(text: str, value: object) -> None:
    read = parse_yaml(text, "here")
    assert (read, type(read)) == (value, type(value))
    assert parse_yaml(dump_yaml({"a": value}), "here") == {"a": value}


def test_a_section_names_its_class_by_short_name_or_import_path() -> None:
    assert Holder.from_dict({"child": {"class": "inner", "lr": 1}}).child == Inner(lr=1.0)
    assert Holder.from_dict({"child": {"lr": 1}}).child == Inner(lr=1.0)
    assert Holder.from_dict({"child": "inner"}).child == Inner()
    assert Holder.from_dict({}).child == Inner()
    assert Holder.from_dict({"other": {"class": "outer", "capacity": 3}}).other == Outer(capacity=3)
    custom = Holder.from_dict({"child": {"class": f"{HERE}:Plain", "gain": 2, "inner": {"lr": 1}}})
    assert custom.child == Plain(gain=2.0, inner=Inner(lr=1.0))
    ready = Inner(lr=5.0)
    assert Holder.from_dict({"child": ready}).child is ready


def test_a_saved_section_carries_its_class(tmp_path: Path) -> None:
    config = Holder(child=Plain(gain=1.5), other=Inner())
    assert config.to_dict()["child"]["class"] == f"{HERE}:Plain"
    assert config.to_dict()["other"]["class"] == "inner"
    config.save(tmp_path / "x.yaml")
    assert Holder.load(tmp_path / "x.yaml") == config


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (3, "child: expected a mapping, or the name of a class, got 3"),
        ({"class": "iner"}, "child.class: expected one of inner, gone or an import path such as "),
        ({"class": 3}, "child.class: expected one of inner, gone or an import path such as "),
        ("gone", "child.class: expected a module that can be imported, for no_such_module_at_all:X, got No module"),
        ({"class": f"{HERE}:Plan"}, f"child.class: expected the name of a class in {HERE}, got 'Plan' (did you mean P"),
        ({"class": f"{HERE}:NoDataclass"}, f"child.class: expected a dataclass, got {HERE}:NoDataclass, which is a cl"),
        ({"class": f"{HERE}:refusal"}, f"child.class: expected a dataclass, got {HERE}:refusal, which is a function"),
        ({"class": f"{HERE}:Plain"}, "child.gain: expected a value, got nothing"),
        ({"class": f"{HERE}:Plain", "gain": 0}, "child: expected values that Plain takes, got gain must not be zero"),
        ({"class": f"{HERE}:Plain", "gian": 0}, "child.gian: expected one of gain, inner, got an unknown key (did you"),
        ({"lr": 0}, "child.lr: expected a positive number, got 0.0"),
    ],
)
def test_a_wrong_section_is_refused_with_its_dotted_key(section: object, message: str) -> None:
    assert refusal(lambda: Holder.from_dict({"child": section})).startswith(message)


def test_a_section_of_a_family_without_default_must_name_its_class() -> None:
    expected = "other.class: expected one of inner, outer or an import path such as my_package.my_module:MyConfig"
    assert refusal(lambda: Holder.from_dict({"other": {"lr": 1}})) == f"{expected}, got nothing"
    assert refusal(lambda: Holder.from_dict({"other": {"class": "inner", "lr": 0}})).startswith("other.lr: ")
    assert Holder.from_dict({"other": None}).other is None


def test_configs_can_be_copied_and_pickled() -> None:
    config = Holder(child=Inner(lr=2.0), other=Outer(capacity=1))
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
