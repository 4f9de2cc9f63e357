"""What ``generate`` of both models refuses in a sentence, asked of shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from course import flux2, sd
from course.families import find_code
from course.model.guidance import guide
from course.tpu.programs import CONFIGURATIONS


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


SD_IDS = shape(2, 1, 77, dtype=jnp.int32)
# For each published model its package, its configuration, and inputs for two images.
PUBLISHED = {
    "sd": (
        sd,
        sd.read_config(CONFIGURATIONS / "sd"),
        {
            "ids": SD_IDS,
            "key": jax.eval_shape(lambda: jax.random.key(0)),
            "negative_ids": SD_IDS,
        },
    ),
    "flux2": (
        flux2,
        flux2.Config(),
        {
            "ids": shape(2, 512, dtype=jnp.int32),
            "mask": shape(2, 512, dtype=bool),
            "noise": shape(2, 4096, 128),
            "height": 1024,
            "width": 1024,
        },
    ),
}


def shape_of_parameters(model):
    package, config, _ = PUBLISHED[model]
    return package.parameter_shapes(config, jnp.bfloat16)


def shape_of_images(model, **changes):
    """The shape of what a published model draws of its inputs, some of which are changed."""
    package, config, inputs = PUBLISHED[model]
    inputs = {"params": shape_of_parameters(model), **inputs, **changes}
    arrays = {}
    options = {"config": config}
    for name, value in inputs.items():
        is_array = name == "params" or hasattr(value, "shape")
        (arrays if is_array else options)[name] = value
    return jax.eval_shape(lambda arrays: package.generate(**arrays, **options), arrays)


@pytest.mark.parametrize(("model", "side"), [("sd", 512), ("flux2", 1024)])
def test_shapes_alone_tell_the_shape_of_the_images(model, side):
    images = shape_of_images(model)
    assert (images.shape, images.dtype) == ((2, side, side, 3), jnp.float32)


# The model, what it is given, and what it says.
REFUSALS = [
    ("sd", {"ids": shape(2, 77)}, r"ids have the shape \(2, 77\): give \('prompts', 1, 77\)"),
    ("sd", {"ids": shape(2, 2, 77)}, r"The token ids have the shape \(2, 2, 77\): give"),
    (
        "sd",
        {"negative_ids": shape(3, 1, 77)},
        r"The negative ids have the shape \(3, 1, 77\): give \(2, 1, 77\)",
    ),
    ("sd", {"negative_ids": None}, "Guidance needs negative_ids: give token ids"),
    (
        "sd",
        {"latents": shape(2, 4, 64, 64)},
        r"are for \(2, 4, 64, 64\): give them for \(2, 64, 64, 4\)\.",
    ),
    (
        "sd",
        {"key": jax.random.split(jax.random.key(0), 3)},
        r"are for \(3, 64, 64, 4\): give them for \(2, 64, 64, 4\)\.",
    ),
    ("sd", {"steps": 0}, "The number of steps is 0: choose a whole number from 1 to 998."),
    ("sd", {"steps": 999}, "The number of steps is 999: choose a whole number from 1 to 998."),
    ("sd", {"steps": 2.5}, "The number of steps is 2.5: choose a whole number from 1 to 998."),
    ("sd", {"height": 0}, "cannot halve images of 0 × 512 pixels: choose multiples of 64."),
    ("sd", {"height": 500}, "cannot halve images of 500 × 512 pixels: choose multiples of 64."),
    ("sd", {"width": -64}, "cannot halve images of 512 × -64 pixels: choose multiples of 64."),
    ("sd", {"sampler": "heun"}, "There is no sampler 'heun': choose one of ddim, euler"),
    ("sd", {"decode_batch": 0}, "decode_batch is 0: give 1 or more, or None for all images."),
    ("sd", {"decode_tile": 3}, "A tile has 3 latents along a side: give 4 or more."),
    ("sd", {"attention": "fast"}, "There is no attention 'fast': choose one of automatic"),
    (
        "sd",
        {"guided": False, "guidance_axis": "half"},
        "Without guidance there are no halves of it for the axis 'half': leave out",
    ),
    (
        "flux2",
        {"height": 1020},
        "1020 x 1024 pixels cannot be divided into tokens of 16 x 16 pixels: "
        "choose multiples of 16.",
    ),
    ("flux2", {"width": 1020}, "1024 x 1020 pixels cannot be divided"),
    ("flux2", {"guidance": 4.0}, r"With guidance, give the empty prompt, too: empty=tokenize\("),
    ("flux2", {"steps": 0}, "There are 0 steps: take a whole number from 1 to 10000."),
    ("flux2", {"steps": 10001}, "There are 10001 steps: take a whole number from 1 to 10000."),
    ("flux2", {"steps": 2.5}, "There are 2.5 steps: take a whole number from 1 to 10000."),
    ("flux2", {"shift": np.nan}, "The shift is nan: take a finite number above 0; 1 is none."),
    ("flux2", {"shift": 0.0}, "The shift is 0.0: take a finite number above 0"),
    (
        "flux2",
        {"images": shape(2, 1024, 512, 3)},
        "the height and width of the result, 1024 x 1024, and these have 1024 x 512: resize",
    ),
    (
        "flux2",
        {"images": shape(3, 1024, 1024, 3)},
        "There are 3 images to edit and 2 prompts: give one image for all prompts, or one for",
    ),
    (
        "flux2",
        {"images": shape(2, 1024, 1024, 3, dtype=np.uint8)},
        "Images are numbers from 0 to 1, and these are uint8: divide them by 255.",
    ),
    (
        "flux2",
        {"noise": shape(1, 4096, 128)},
        r"2 prompts and 1024 x 1024 pixels need noise of the shape \(2, 4096, 128\), and this has",
    ),
]


@pytest.mark.parametrize(("model", "changes", "sentence"), REFUSALS)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(model, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        shape_of_images(model, **changes)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("scale", [1.0, 0.0, -2.0])
def test_guidance_of_1_or_less_is_none_and_costs_nothing(model, scale):
    package, config, inputs = PUBLISHED[model]
    none = {"sd": {"guided": False}, "flux2": {"guidance": None}}[model]

    def program(**options):
        arrays, others = {}, {"config": config, "steps": 2, **options}
        for name, value in inputs.items():
            (arrays if hasattr(value, "shape") else others)[name] = value
        draw = jax.make_jaxpr(lambda params, arrays: package.generate(params, **arrays, **others))
        return str(draw(shape_of_parameters(model), arrays))

    assert program(guidance=scale) == program(**none)


def test_a_scale_that_a_program_gets_stops_at_1():
    without, prompted = np.float32([[1, 2], [3, np.nan]]), np.float32([[5, 6], [7, 8]])
    guided = jax.jit(guide)(np.float32([2, 1]), without, prompted)
    assert guided.tolist() == [[9, 10], [7, 8]]
    assert np.isnan(guide(np.nan, without, prompted)).all()  # which is no guidance of 1


@pytest.mark.parametrize("model", ["shapes-sd", "shapes-flux2"])
@pytest.mark.parametrize("steps", [0, 2 * 10**9])
def test_a_command_takes_no_more_steps_than_the_model_has(model, steps):
    """They are an input of its program, which would take them all."""
    folder = helpers.bundled_checkpoint(model).source
    code = find_code(folder)
    params, config, tokenize = code.load(folder)
    draw = code.make_drawing(config, tokenize, steps, 3.0)
    with pytest.raises(ValueError, match=f"{steps}.* a whole number from 1 to"):
        draw(params, tokenize(["a red heart"]), jax.random.split(jax.random.key(0), 1), None)


@pytest.mark.parametrize("values", [200.0, -0.5, np.nan])
def test_pictures_beyond_0_to_1_are_refused(values):
    params, config = shape_of_parameters("flux2"), flux2.Config()
    pictures = np.full((1, 32, 32, 3), values, np.float32)
    with pytest.raises(ValueError, match=r"from 0 to 1, and these go from .*: divide bytes by"):
        flux2.encode_images(params, config, pictures)


SPOILED = {
    ("sd", "unet", "conv_in.bias", None): r"is missing: give parameters .* has it as \(320,\)\.",
    ("sd", "unet", "conv_in.bias", (4,)): r"has the shape \(4,\): give .* has it as \(320,\)\.",
    ("sd", "vae", "post_quant_conv.weight", (1, 1, 4, 3)): r"has the shape \(1, 1, 4, 3\): give",
    ("flux2", "transformer", "proj_out.weight", None): r"is missing: .* as \(3072, 128\)\.",
    ("flux2", "transformer", "proj_out.weight", (3072,)): r"has the shape \(3072,\): give",
    ("flux2", "vae", "bn.running_mean", (32,)): r"has the shape \(32,\): .* has it as \(128,\)\.",
}


@pytest.mark.parametrize(("model", "part", "name", "sizes"), SPOILED)
def test_a_parameter_that_is_missing_or_does_not_fit_is_named(model, part, name, sizes):
    params = shape_of_parameters(model)
    del params[part][name]
    if sizes:
        params[part][name] = shape(*sizes)
    sentence = f"The parameter {name} of {part} {SPOILED[model, part, name, sizes]}"
    with pytest.raises(ValueError, match=sentence):
        shape_of_images(model, params=params)
