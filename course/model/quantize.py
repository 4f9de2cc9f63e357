"""int8 for a UNet or a transformer: whole numbers from -127 to 127, and what they are scaled by.

Weights are rounded once, with a scale for each output channel. What they are multiplied by is
rounded in the program, with a scale for each vector (*dynamic* quantization), so nothing has to be
measured beforehand. Products of int8 are added up in int32, which is exact, and then scaled (Jacob
et al., 2018; Dettmers et al., LLM.int8, 2022). The peak of v5e, v5p and v6e chips is twice as high
in int8 as in bfloat16.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

# Which layers are rounded: regular expressions for their names.
LAYERS = {
    # All but the first and the last layers, which see latents; those of the time, which is one
    # vector for an image; and keys and values of the text, which are computed once for all steps.
    # There is hardly any time to win in any of these. First the UNet's names, then those of
    # FLUX.2's transformer.
    "all": r"(?!conv_in|conv_out|.*time_emb|.*add_emb|.*attn2\.to_[kv]"
    r"|x_embedder|context_embedder|time_guidance_embed|.*_modulation|norm_out|proj_out)",
    # Those in which a rounded number is then multiplied by many, which wins back the time to round
    # it: by the columns of to_q, to_k and to_v together; of the feed-forward part's first layer,
    # which has eight outputs for each input; or of a convolution, once for each neighbour. By the
    # cycles that the TPU compiler expects (lab/records/ask/int8.json), XL gains at 1,280 channels,
    # and hardly at fewer. They are the UNet's alone.
    "gaining": r".*(attn1\.to_[qkv]|ff\.net\.0\.proj|conv[12]|samplers\.0\.conv)\.",
}
LARGEST = 127  # -128 has no opposite


def round_to_int8(x: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return whole numbers and their scale: ``values * scale`` is ``x``, but for half of a scale.

    Parameters
    ----------
    x : jax.Array
        Of any shape and floating dtype.
    axis : int or tuple of int
        The axes over which numbers share a scale: at least those over which a product sums, so
        that the sum can be multiplied by it afterwards.

    Returns
    -------
    values : jax.Array
        int8, in the shape of ``x``.
    scale : jax.Array
        float32; the axes have the size 1.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / LARGEST
    return jnp.round(wide / scale).astype(jnp.int8), scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight in int8: an array can be multiplied by it, or convolved with it.

    It may be that of stacked layers, whose leaves ``jax.lax.scan`` slices.
    """

    values: jax.Array  # int8: (..., inputs, outputs), or (size, size, inputs, outputs)
    scale: jax.Array  # float32: (..., 1, outputs), or (1, 1, 1, outputs)
    # The dtype of what comes out, which was the weight's.
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> "Quantized":
        """Return the matrix of a convolution of one pixel, which is ``weight[0, 0]``."""
        return Quantized(self.values[index], self.scale[index], self.dtype)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return ``x @ self``, (..., inputs) to (..., outputs), with a scale for each vector."""
        values, scale = round_to_int8(x, axis=-1)
        y = jnp.matmul(values, self.values, preferred_element_type=jnp.int32)
        return (y * scale * self.scale).astype(self.dtype)

    def convolve(self, x: jax.Array, stride: int, padding: tuple[int, int]) -> jax.Array:
        """Convolve (batch, height, width, inputs), see ``course.model.layers.conv``.

        A pixel is multiplied by its neighbours' weights, too, so all of an image have one scale. It
        is written as a product of matrices: each pixel gets its neighbours' channels beside its own
        (*im2col*). By the TPU compiler, a convolution in int8 takes as long as in bfloat16, and
        this about half.
        """
        values, scale = round_to_int8(x, axis=(1, 2, 3))
        size, _, inputs, outputs = self.shape
        values = jnp.pad(values, ((0, 0), padding, padding, (0, 0)))
        height = (values.shape[1] - size) // stride + 1
        width = (values.shape[2] - size) // stride + 1
        neighbours = []
        for i in range(size):
            for j in range(size):
                rows = values[:, i : i + stride * height : stride]
                neighbours.append(rows[:, :, j : j + stride * width : stride])
        y = jax.lax.dot_general(
            jnp.concatenate(neighbours, axis=-1),  # (batch, height, width, size² inputs)
            self.values.reshape(size**2 * inputs, outputs),
            (((3,), (0,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        return (y * scale * self.scale).astype(self.dtype)


def quantize(
    parameters: dict[str, jax.Array], layers: str = "all"
) -> dict[str, jax.Array | Quantized]:
    """Round the weights of linear layers and convolutions of a UNet or a transformer to int8.

    Biases and norms stay as they are. Where parameters lie on several devices, so do these.

    Parameters
    ----------
    parameters : dict
        The part's by name, such as ``params["unet"]`` of ``course.sd.load`` or
        ``params["transformer"]`` of ``course.flux2.load``. If there is a LoRA for the model, merge
        it first.
    layers : str
        Which layers: a name in ``LAYERS``.

    Returns
    -------
    dict
        A new dictionary of the same names and shapes, for
        ``params | {"unet": quantize(params["unet"])}``.

    Raises
    ------
    ValueError
        If a weight is no array: it is quantized already, or has a LoRA beside it. Or if there is no
        such name in ``LAYERS``, or none of its layers here.
    """
    if layers not in LAYERS:
        raise ValueError(f"There are no layers {layers!r}: choose one of {', '.join(LAYERS)}.")
    rounded = {}
    for name, value in parameters.items():
        if not hasattr(value, "ndim"):
            raise ValueError(
                f"{name} is {type(value).__name__}, and no array: "
                "give the parameters as load does, with a LoRA merged and not beside them."
            )
        is_matrix = name.endswith(".weight") and value.ndim - ("*" in name) >= 2
        if is_matrix and re.match(LAYERS[layers], name):
            rounded[name] = quantize_weight(value)
        else:
            rounded[name] = value
    if not any(isinstance(value, Quantized) for value in rounded.values()):
        raise ValueError(f"None of these parameters is among the layers {layers!r}: give others.")
    return rounded


@jax.jit
def quantize_weight(weight: jax.Array) -> Quantized:
    """Round one weight, with a scale for each output channel.

    It is (inputs, outputs), (layers, inputs, outputs) or (size, size, inputs, outputs).
    """
    values, scale = round_to_int8(weight, axis=(0, 1, 2) if weight.ndim == 4 else -2)
    return Quantized(values, scale, weight.dtype)
