"""int8 in both models: what is rounded, what is multiplied, and how near the results are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import flux2, sd
from course.model import layers
from course.model.lora import Pair, attach, merge
from course.model.parameters import check_parameters
from course.model.quantize import Quantized, quantize, quantize_weight, round_to_int8
from course.tpu.jaxpr import equations_of
from helpers import read_record
from lab.ask import int8
from tests.makers import small


@pytest.fixture(scope="module")
def model(models):
    return models["shapes-sd"]


@pytest.fixture(scope="module")
def rounded(model):
    params, _, _ = model
    return params | {"unet": quantize(params["unet"])}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def error(found, expected):
    """The root of the mean square of the difference, by that of what is expected."""
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)


def products_of(function, *arguments):
    """The dtypes of both operands and of the result, for each product."""
    found = []
    for equation, _ in equations_of(function, *arguments):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            variables = [*equation.invars, *equation.outvars]
            found.append(tuple(str(variable.aval.dtype) for variable in variables))
    return found


def test_numbers_are_rounded_to_half_of_a_scale_and_the_largest_is_127():
    x = normal(0, 5, 64) * jnp.array([[1e-3], [1], [10], [1e4], [0]])
    values, scale = round_to_int8(x, axis=-1)
    assert (values.dtype, scale.dtype, scale.shape) == (jnp.int8, jnp.float32, (5, 1))
    assert jnp.all(jnp.abs(values * scale - x) <= 0.5001 * scale)
    assert jnp.abs(values).max(axis=-1).tolist() == [127, 127, 127, 127, 0]


# Each number is off by up to half of a scale, of 127 to the largest one. Of normal numbers, that is
# a hundredth of what they are; both operands are rounded.
LIMIT = 0.02


def with_outliers(x):
    """Some vectors are a thousand times larger, and so are some of the weights' columns."""
    return x.at[..., 0, :].multiply(1000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_linear_layer_in_int8_is_close_to_the_wide_one(dtype):
    x = with_outliers(normal(0, 2, 9, 64)).astype(dtype)
    weight = with_outliers(normal(1, 32, 64)).T.astype(dtype)
    p = {"it.weight": weight, "it.bias": normal(2, 32).astype(dtype)}
    small = p | {"it.weight": quantize_weight(weight)}
    found = layers.linear(small, "it", x)
    assert found.dtype == dtype
    expected = layers.linear({name: jnp.float32(value) for name, value in p.items()}, "it", x)
    for row, column in ((0, 0), (1, 0), (0, 1), (1, 1)):  # none is drowned by a larger one
        rows = slice(0, 1) if row == 0 else slice(1, None)
        columns = slice(0, 1) if column == 0 else slice(1, None)
        assert error(found[:, rows, columns], expected[:, rows, columns]) < LIMIT
    assert products_of(lambda x: layers.linear(small, "it", x), x) == [("int8", "int8", "int32")]


@pytest.mark.parametrize(("size", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_a_convolution_in_int8_is_close_to_the_wide_one(size, stride):
    x = normal(0, 2, 8, 8, 16) * jnp.array([1, 1000]).reshape(2, 1, 1, 1)  # two images
    weight = normal(1, size, size, 16, 32).at[..., 0].multiply(1000)
    p = {"it.weight": weight, "it.bias": normal(2, 32)}
    small = p | {"it.weight": quantize_weight(weight)}
    found = layers.conv(small, "it", x, stride)
    expected = layers.conv(p, "it", x, stride)
    for image in (0, 1):
        assert error(found[image, ..., 0], expected[image, ..., 0]) < LIMIT
        assert error(found[image, ..., 1:], expected[image, ..., 1:]) < LIMIT
    products = products_of(lambda x: layers.conv(small, "it", x, stride), x)
    assert products == [("int8", "int8", "int32")]


def test_stacked_layers_are_rounded_one_by_one_and_scanned():
    weights = normal(0, 3, 16, 16) * jnp.array([1, 100, 0.01]).reshape(3, 1, 1)
    stacked = quantize_weight(weights)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(stacked)} == {3}
    x = normal(1, 4, 16)
    found, _ = jax.lax.scan(lambda x, weight: (x @ weight, None), x, stacked)
    expected = x
    for weight in weights:
        expected = expected @ quantize_weight(weight)
    assert jnp.array_equal(found, expected)
    assert error(found, x @ weights[0] @ weights[1] @ weights[2]) < 3 * LIMIT


def test_what_has_little_work_stays_wide(model, rounded):
    params, config, _ = model
    wide = set()
    for name, value in rounded["unet"].items():
        assert value.shape == params["unet"][name].shape
        assert value.dtype == params["unet"][name].dtype
        if not isinstance(value, Quantized):
            assert value is params["unet"][name]
            wide.add(name)
    found = {name for name in wide if name.endswith(".weight") and "norm" not in name}
    few = {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}
    many = (".time_emb_proj.weight", ".attn2.to_k.weight", ".attn2.to_v.weight")
    assert {name for name in found if not name.endswith(many)} == {f"{name}.weight" for name in few}
    for ending in many:
        assert any(name.endswith(ending) for name in found)
    check_parameters(rounded, sd.model_parameters(config))


def test_layers_that_gain_are_a_few_of_all(model, rounded):
    params, _, _ = model
    few = quantize(params["unet"], "gaining")
    names = {name for name, value in few.items() if isinstance(value, Quantized)}
    assert names < {name for name, value in rounded["unet"].items() if isinstance(value, Quantized)}
    endings = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    assert endings == {"to_q", "to_k", "to_v", "proj", "conv1", "conv2", "conv"}
    with pytest.raises(ValueError, match="no layers 'some': choose one of all, gaining"):
        quantize(params["unet"], "some")


def test_in_a_step_only_attention_and_what_stays_wide_is_not_in_int8():
    wide, small = (int8.count_operations("shapes-sd", weights) for weights in ("bfloat16", "int8"))
    assert small.total() == wide.total()  # the work is the same
    assert ("attention", "int8") not in small
    for kind in ("linear layers", "convolutions"):
        assert small[kind, "int8"] > 0.9 * wide[kind, "bfloat16"]


def draw_sd(params):
    ids = np.arange(14).reshape(2, 1, 7)
    return sd.generate(params, small.SD, ids, jax.random.key(3), steps=2, guided=False)


def draw_flux2(params, config, tokenize):
    ids, mask = tokenize(["a large red circle on white"])
    noise = flux2.random_tokens(jax.random.key(3), config, 1, 16, 16)
    return flux2.generate(params, config, ids, mask, noise, 16, 16, steps=2)


@pytest.mark.parametrize("part", ["unet", "transformer"])
def test_images_in_int8_are_close_and_not_the_same(part, small_sd, small_flux2):
    params, *rest = small_flux2 if part == "transformer" else (small_sd,)
    draw = draw_flux2 if part == "transformer" else draw_sd
    rounded = params | {part: quantize(params[part])}
    program = jax.jit(lambda params: draw(params, *rest))
    difference = 255 * jnp.abs(program(rounded) - program(params))
    assert 1e-3 < difference.mean() < 1


def test_of_flux2_all_weights_in_blocks_are_rounded_and_no_others():
    shapes = flux2.parameter_shapes(flux2.Config())["transformer"]
    small = jax.eval_shape(quantize, shapes)
    of_blocks = {name for name in shapes if "*" in name and "norm" not in name}
    assert {name for name, value in small.items() if isinstance(value, Quantized)} == of_blocks
    with pytest.raises(ValueError, match="None of these parameters is among the layers 'gaining'"):
        jax.eval_shape(lambda p: quantize(p, "gaining"), shapes)


def test_a_lora_is_merged_before_or_lies_beside_weights_in_int8():
    weight = normal(0, 16, 8)
    pair = Pair(normal(1, 16, 2), normal(2, 2, 8))
    lora = {"unet": {"it.weight": pair}}
    small = {"unet": {"it.weight": quantize_weight(weight)}}
    x = normal(3, 4, 16)
    beside = attach(small, lora, 0.5)["unet"]
    merged = merge({"unet": {"it.weight": weight}}, lora, 0.5)["unet"]
    assert error(layers.linear(beside, "it", x), layers.linear(merged, "it", x)) < LIMIT
    with pytest.raises(ValueError, match="merge the LoRA first"):
        merge(small, lora)
    with pytest.raises(ValueError, match=r"it\.weight is Adapted, and no array"):
        quantize(beside)
    convolution = {"unet": {"it.weight": quantize_weight(normal(4, 3, 3, 16, 8))}}
    pair = Pair(normal(5, 3, 3, 16, 2), normal(6, 1, 1, 2, 8))
    with pytest.raises(ValueError, match=r"A weight of \(3, 3, 16, 8\) is in int8"):
        attach(convolution, {"unet": {"it.weight": pair}}, 1.0)


def test_what_is_split_over_devices_stays_split():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = NamedSharding(mesh, P(None, "model"))
    small = quantize({"it.weight": jax.device_put(normal(0, 16, 8), split)})["it.weight"]
    assert small.values.sharding.is_equivalent_to(split, 2)
    assert small.scale.sharding.is_equivalent_to(split, 2)


def test_the_judge_finds_as_many_images_right_in_int8():
    right = {str(row["question"]): row["answer"]["right"] for row in read_record("score/sd")}
    settings = [row["question"] for row in read_record("score/sd")]
    small = [setting for setting in settings if setting["weights"] == "int8"]
    assert len(small) >= 3
    for setting in small:
        wide = setting | {"weights": "float32"}
        assert abs(right[str(setting)] - right[str(wide)]) <= 2


PROGRAM = """\
%body.1 (a: s8[8]) -> s8[8] {
  %x.1 = s8[8,8]{1,0} parameter(0)
  %y = bf16[8,8]{1,0} parameter(1)
  %z = s32[8,8]{1,0} convolution(%x.1, %x.1), dim_labels=bf_io->bf, "estimated_cycles":"5"
  %i = s32[] get-tuple-element(%a), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[8,8]{1,0}) tuple(%next, %z)
}

%condition.1 (a: s8[8]) -> pred[] {
  %i.2 = s32[] get-tuple-element(%a), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i.2, %n), direction=LT
}

%fused.1 (a: s8[8]) -> s8[8] {
  %v = bf16[8,8]{1,0} convolution(%y, %y), dim_labels=bf_io->bf
}

ENTRY %main (a: s8[8]) -> s8[8] {
  %f = bf16[8,8]{1,0} fusion(%y), kind=kOutput, calls=%fused.1, "estimated_cycles":"20"
  %g = bf16[8,8]{1,0} copy(%f), "estimated_cycles":"7"
  %w = bf16[8,8]{1,0} convolution(%y, %y), dim_labels=bf_io->bf, "estimated_cycles":"100"
  %l = s8[8] while(%a), condition=%condition.1, body=%body.1
}
"""


def test_the_text_of_a_compiled_program_is_read():
    assert int8.count_cycles(PROGRAM) == {"products": 135, "others": 7}
