import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from outrider.agents.networks import (
    Dueling,
    ImageEncoder,
    Mlp,
    NatureCnn,
    TwinQ,
    VectorEncoder,
    encoder,
    initial_values,
    mlp,
    q_network,
)
from outrider.errors import UnsupportedSpace

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint8, np.uint32])
def test_a_box_of_any_dtype_becomes_a_float32_vector(dtype: type) -> None:
    encode = VectorEncoder(spaces.Box(0, 100, (2, 3), dtype))
    obs = np.arange(12).reshape(2, 2, 3).astype(dtype)
    out = encode(obs)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, np.arange(12, dtype=np.float32).reshape(2, 6))


def test_a_box_without_axes_is_a_vector_of_one() -> None:
    encode = VectorEncoder(spaces.Box(-1.0, 1.0, ()))
    assert encode.shape == (1,)
    np.testing.assert_array_equal(encode(np.array([0.5, -0.5], np.float32)), [[0.5], [-0.5]])


def test_rows_of_a_structured_array_are_encoded() -> None:
    rows = np.zeros(3, np.dtype([("flag", np.bool_), ("obs", np.float64, (2,))], align=True))
    rows["obs"] = [[1, 2], [3, 4], [5, 6]]
    out = VectorEncoder(spaces.Box(-9, 9, (2,), np.float64))(rows["obs"])
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(out, [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize("start", [0, -1, 10])
def test_discrete_observations_are_one_hot_from_their_start(start: int) -> None:
    encode = VectorEncoder(spaces.Discrete(3, start=start))
    np.testing.assert_array_equal(encode(np.array([start + 2, start])), [[0, 0, 1], [1, 0, 0]])


def test_multi_discrete_observations_are_one_hot_per_entry() -> None:
    encode = VectorEncoder(spaces.MultiDiscrete([2, 3], start=[5, -1]))
    np.testing.assert_array_equal(encode(np.array([[5, 1], [6, -1]])), [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]])


def test_multi_discrete_observations_may_have_two_axes() -> None:
    encode = VectorEncoder(spaces.MultiDiscrete(np.array([[2, 2], [2, 3]])))
    np.testing.assert_array_equal(encode(np.array([[[0, 1], [1, 2]]])), [[1, 0, 0, 1, 0, 1, 0, 0, 1]])


def test_multi_binary_observations_become_floats() -> None:
    np.testing.assert_array_equal(
        VectorEncoder(spaces.MultiBinary(3))(np.array([[1, 0, 1]], np.int8)), [[1.0, 0.0, 1.0]]
    )


def test_the_leaves_of_a_nested_dict_are_joined_in_the_order_of_the_space() -> None:
    pos = spaces.Dict({"xy": spaces.Box(-1, 1, (2,)), "floor": spaces.Discrete(2, start=1)})
    space = spaces.Dict({"pos": pos, "on": spaces.MultiBinary(1)})
    obs = {
        "on": np.array([[1], [0]], np.int8),
        "pos": {"floor": np.array([2, 1]), "xy": np.full((2, 2), 0.5, np.float32)},
    }
    encode = VectorEncoder(space)
    names = {"xy": [0.5, 0.5], "floor": [[0, 1], [1, 0]], "on": [[1], [0]]}
    order = [name for top in space.spaces for name in (pos.spaces if top == "pos" else [top])]
    expected = np.hstack([np.broadcast_to(names[name], (2, np.shape(names[name])[-1])) for name in order])
    np.testing.assert_array_equal(encode(obs), expected)


def test_an_image_among_the_leaves_is_refused_by_name() -> None:
    space = spaces.Dict({"camera": spaces.Dict({"left": IMAGE}), "speed": spaces.Box(-1, 1, (1,))})
    with pytest.raises(UnsupportedSpace, match=r"^env\.observation_space\.camera\.left: expected no image"):
        encoder(space, "auto")


def test_auto_takes_images_to_a_cnn_and_mlp_refuses_them() -> None:
    assert isinstance(encoder(IMAGE, "auto"), ImageEncoder)
    with pytest.raises(UnsupportedSpace, match="network: cnn"):
        encoder(IMAGE, "mlp")


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (4,)), spaces.Box(0, 255, (4, 20, 84), np.uint8)])
def test_a_cnn_refuses_what_is_no_image_of_sufficient_size(space: spaces.Space) -> None:
    with pytest.raises(UnsupportedSpace, match="at least 36 x 36"):
        encoder(space, "cnn")


def test_uint8_images_stay_uint8_until_they_are_in_the_network() -> None:
    obs = np.full((2, 4, 84, 84), 255, np.uint8)
    encode = encoder(IMAGE, "auto")
    assert encode(obs) is obs
    net = NatureCnn(IMAGE.shape)
    seen = []
    net.convolutions[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    assert net(torch.from_numpy(obs)).shape == (2, net.outputs) == (2, 3136)
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], torch.ones(2, 4, 84, 84))


def test_a_cnn_sees_the_same_whichever_axis_holds_the_channels() -> None:
    first, last = NatureCnn((3, 40, 50)), NatureCnn((40, 50, 3))
    last.load_state_dict(first.state_dict())
    x = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    torch.testing.assert_close(first(x), last(x.permute(0, 2, 3, 1)))


def test_a_float_image_is_not_scaled() -> None:
    net = NatureCnn((1, 36, 36))
    x = torch.rand(1, 1, 36, 36)
    torch.testing.assert_close(net(x), net.convolutions(x))


def test_an_mlp_gives_what_the_same_layers_in_sequence_give() -> None:
    net = mlp(3, (8, 8), 2, "tanh")
    x = torch.randn(5, 3)
    torch.testing.assert_close(net(x), nn.Sequential(*net)(x), rtol=0, atol=0)
    assert [type(layer) for layer in net] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]


def test_a_duelling_network_adds_the_advantage_less_its_mean() -> None:
    net = q_network(VectorEncoder(spaces.Box(-1, 1, (3,))), 4, (8,), "relu", dueling=True)
    assert isinstance(net, Dueling)
    x = torch.randn(5, 3)
    torch.testing.assert_close(net(x).mean(1, keepdim=True), net.value(net.torso(x)))


def test_a_q_network_of_images_is_the_convolutions_and_the_hidden_layers() -> None:
    net = q_network(encoder(IMAGE, "cnn"), 6, (32,), "relu")
    assert isinstance(net, Mlp)
    assert net(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 6)


def test_stacked_critics_equal_two_networks_of_their_own() -> None:
    twin = TwinQ(3, 2, (8, 8), "relu")
    obs, act = torch.randn(5, 3), torch.randn(5, 2)
    out = twin(obs, act)
    for i in range(2):
        x = torch.cat((obs, act), 1)
        for k in range(3):
            x = x @ twin.weights[k][i] + twin.biases[k][i]
            x = x.relu() if k < 2 else x
        torch.testing.assert_close(out[i], x[:, 0])
    assert not torch.equal(out[0], out[1])


def test_initial_values_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    with initial_values(3):
        a = mlp(2, (4,), 1)
    torch.rand(7)
    with initial_values(3):
        b = mlp(2, (4,), 1)
    assert torch.equal(a[0].weight, b[0].weight)
    with initial_values(4):
        assert not torch.equal(mlp(2, (4,), 1)[0].weight, a[0].weight)
    torch.set_rng_state(state)
    with initial_values(3):
        pass
    assert torch.equal(torch.get_rng_state(), state)
