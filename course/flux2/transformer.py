"""The transformer: it predicts the velocity from tokens of the image and tokens of the text.

In *double-stream* blocks, text and image have weights of their own and meet in attention only. In
*single-stream* blocks, they are one sequence, and attention and feed-forward layer work side by
side on the same input.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2.configs import TransformerConfig
from course.model.attention import automatic, find_attention, splash
from course.model.layers import (
    Parameter,
    linear,
    matrix_parameters,
    rms_norm,
    rms_norm_parameters,
    stack_parameters,
    stacked_layers,
    swiglu,
    within,
)

DOUBLE, SINGLE = "transformer_blocks", "single_transformer_blocks"
TIME = "time_guidance_embed.timestep_embedder"
SECOND_TIME = "time_guidance_embed.guidance_embedder"
ATTENTION = {"automatic": automatic, "splash": splash}  # ``splash`` is for TPUs


def transformer_parameters(config: TransformerConfig) -> dict[str, Parameter]:
    """Return shapes and logical axes of the transformer's parameters, by name."""
    width = config.width
    head = rms_norm_parameters(config.attention_head_dim)
    hidden = int(width * config.mlp_ratio)

    double = {}
    for query, key, value, out in (
        ("to_q", "to_k", "to_v", "to_out.0"),
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    ):
        for name in (query, key, value):
            double |= within(f"attn.{name}", matrix_parameters(width, width, ("embed", "heads")))
        double |= within(f"attn.{out}", matrix_parameters(width, width, ("heads", "embed")))
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        double |= within(f"attn.{name}", head)
    for name in ("ff", "ff_context"):
        double |= within(
            f"{name}.linear_in", matrix_parameters(width, 2 * hidden, ("embed", "mlp"))
        )
        double |= within(f"{name}.linear_out", matrix_parameters(hidden, width, ("mlp", "embed")))

    # One matrix for queries, keys, values and both halves of the feed-forward layer, and one that
    # takes the results of both. Split over devices, it would be better cut by its parts: as one,
    # it is cut wherever the pieces end, which costs exchanges.
    single = within(
        "attn.to_qkv_mlp_proj",
        matrix_parameters(width, 3 * width + 2 * hidden, ("embed", "heads_and_mlp")),
    )
    single |= within(
        "attn.to_out", matrix_parameters(width + hidden, width, ("heads_and_mlp", "embed"))
    )
    single |= within("attn.norm_q", head) | within("attn.norm_k", head)

    parameters = within("x_embedder", matrix_parameters(config.in_channels, width, (None, "embed")))
    parameters |= within(
        "context_embedder", matrix_parameters(config.joint_attention_dim, width, (None, "embed"))
    )
    frequencies = config.timestep_guidance_channels
    for embedder in (TIME, SECOND_TIME) if config.guidance_embeds else (TIME,):
        parameters |= within(
            f"{embedder}.linear_1", matrix_parameters(frequencies, width, (None, "embed"))
        )
        parameters |= within(
            f"{embedder}.linear_2", matrix_parameters(width, width, (None, "embed"))
        )
    for name, sets in (
        ("double_stream_modulation_img", 2),
        ("double_stream_modulation_txt", 2),
        ("single_stream_modulation", 1),
    ):
        parameters |= within(f"{name}.linear", matrix_parameters(width, 3 * sets * width))
    parameters |= stack_parameters(DOUBLE, config.num_layers, double)
    parameters |= stack_parameters(SINGLE, config.num_single_layers, single)
    parameters |= within("norm_out.linear", matrix_parameters(width, 2 * width))
    return parameters | within(
        "proj_out", matrix_parameters(width, config.in_channels, ("embed", None))
    )


def unchanged(x: jax.Array) -> jax.Array:
    """Return an array as it is."""
    return x


def velocity(
    p: dict,
    config: TransformerConfig,
    image: jax.Array,
    text: jax.Array,
    time: jax.Array,
    image_positions: np.ndarray,
    text_positions: np.ndarray,
    remat: bool = False,
    until: jax.Array | None = None,
    attend: str | Callable = "automatic",
) -> jax.Array:
    """diffusers' ``Flux2Transformer2DModel``: noise minus data, as the model predicts it.

    Parameters
    ----------
    p : dict
        The transformer's parameters.
    config : TransformerConfig
    image : jax.Array
        Tokens of the noisy image, and behind them those of reference images, if there are any:
        (batch, image tokens, in_channels).
    text : jax.Array
        (batch, text tokens, joint_attention_dim).
    time : jax.Array
        From 0, which is data, to 1, which is noise: (batch,).
    image_positions, text_positions : numpy.ndarray
        Where each token is, on four axes: (tokens, 4). See ``flux2.positions``.
    remat : bool
        Rematerialisation: for gradients, the activations in a block are computed again, and not
        kept.
    until : jax.Array, optional
        For a flow map: the time that it goes to, (batch,). Then the result is the average velocity
        on the way from ``time`` to there.
    attend : str or callable
        Attention: a name in ``ATTENTION``, or a function that takes and gives what ``automatic``
        does. To draw with it, give ``generate`` the velocity
        ``functools.partial(velocity, attend="splash")``.

    Returns
    -------
    jax.Array
        (batch, image tokens, in_channels), float32.

    Raises
    ------
    ValueError
        If there is a second time and the transformer has no embedder for it, or no such attention
        here.
    """
    attend = find_attention(attend, ATTENTION)
    rotation = rotary(np.concatenate([text_positions, image_positions]), config)
    return predict(p, config, image, text, time, rotation, attend, remat, until=until)


def predict(
    p: dict,
    config: TransformerConfig,
    image: jax.Array,
    text: jax.Array,
    time: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    attend: Callable = automatic,
    remat: bool = False,
    add_up: Callable = unchanged,
    until: jax.Array | None = None,
) -> jax.Array:
    """Return what ``velocity`` does, from rotary positions that are computed already.

    Parameters
    ----------
    p, config, image, text, time, remat, until
        As in ``velocity``.
    rotation : tuple of jax.Array
        As ``rotary`` gives it, of the text's tokens and then of the image's.
    attend : callable
        Attention: ``automatic``, or a function that takes the same and gives the same.
    add_up : callable
        What makes a layer's result of the sums that a device has: where each device has some heads
        and channels of the blocks, those of all devices have to be added.
    """
    epsilon = config.eps
    texts = text.shape[1]

    # What the time says to each block: by how much to shift, scale and gate all channels.
    with jax.named_scope("modulation"):
        condition = jax.nn.silu(embed_time(p, config, time, until))
        modulate_image = modulation(p, "double_stream_modulation_img", condition)
        modulate_text = modulation(p, "double_stream_modulation_txt", condition)
        modulate_both = modulation(p, "single_stream_modulation", condition)

    text = linear(p, "context_embedder", text)
    image = linear(p, "x_embedder", image)
    with jax.named_scope("double_stream"):

        def double(p: dict, streams: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return double_block(
                p, config, *streams, modulate_text, modulate_image, rotation, attend, add_up
            )

        text, image = scan_blocks(double, p, DOUBLE, (text, image), remat)
    with jax.named_scope("single_stream"):

        def single(p: dict, x: jax.Array) -> jax.Array:
            return single_block(p, config, x, modulate_both, rotation, attend, add_up)

        both = jnp.concatenate([text, image], axis=1)
        image = scan_blocks(single, p, SINGLE, both, remat)[:, texts:]
    scale, shift = jnp.split(linear(p, "norm_out.linear", condition)[:, None], 2, axis=-1)
    return linear(p, "proj_out", modulated(image, shift, scale, epsilon)).astype(jnp.float32)


Streams = jax.Array | tuple[jax.Array, jax.Array]


def scan_blocks(
    block: Callable[[dict, Streams], Streams],
    p: dict,
    name: str,
    x: Streams,
    remat: bool = False,
) -> Streams:
    """Apply equal blocks one after another, by ``jax.lax.scan``, which compiles one of them.

    ``block`` takes the parameters of one block by their names in it, and one stream or both. With
    ``remat``, its activations are computed again for gradients.
    """
    if remat:
        block = jax.checkpoint(block)
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked_layers(p, name))
    return x


def double_block(
    p: dict,
    config: TransformerConfig,
    text: jax.Array,
    image: jax.Array,
    modulate_text: list[jax.Array],
    modulate_image: list[jax.Array],
    rotation: tuple[np.ndarray, np.ndarray],
    attend: Callable = automatic,
    add_up: Callable = unchanged,
) -> tuple[jax.Array, jax.Array]:
    """Text and image, each with weights of its own, look at each other and at themselves."""
    epsilon = config.eps
    texts = text.shape[1]
    y = modulated(text, *modulate_text[:2], epsilon)
    z = modulated(image, *modulate_image[:2], epsilon)
    query = jnp.concatenate(
        [
            rms_norm(p, "attn.norm_added_q", heads(p, "attn.add_q_proj", y, config), epsilon),
            rms_norm(p, "attn.norm_q", heads(p, "attn.to_q", z, config), epsilon),
        ],
        axis=1,
    )
    key = jnp.concatenate(
        [
            rms_norm(p, "attn.norm_added_k", heads(p, "attn.add_k_proj", y, config), epsilon),
            rms_norm(p, "attn.norm_k", heads(p, "attn.to_k", z, config), epsilon),
        ],
        axis=1,
    )
    value = jnp.concatenate(
        [heads(p, "attn.add_v_proj", y, config), heads(p, "attn.to_v", z, config)], axis=1
    )
    seen = attention(rotate(query, rotation), rotate(key, rotation), value, attend)
    text += modulate_text[2] * add_up(linear(p, "attn.to_add_out", seen[:, :texts]))
    image += modulate_image[2] * add_up(linear(p, "attn.to_out.0", seen[:, texts:]))
    y = modulated(text, *modulate_text[3:5], epsilon)
    text += modulate_text[5] * add_up(feed_forward(p, "ff_context", y))
    z = modulated(image, *modulate_image[3:5], epsilon)
    image += modulate_image[5] * add_up(feed_forward(p, "ff", z))
    return text, image


def single_block(
    p: dict,
    config: TransformerConfig,
    x: jax.Array,
    modulate: list[jax.Array],
    rotation: tuple[np.ndarray, np.ndarray],
    attend: Callable = automatic,
    add_up: Callable = unchanged,
) -> jax.Array:
    """Text and image are one sequence; attention and feed-forward layer work side by side."""
    shift, scale, gate = modulate
    y = linear(p, "attn.to_qkv_mlp_proj", modulated(x, shift, scale, config.eps))
    hidden = int(config.width * config.mlp_ratio)
    ends = np.cumsum([config.width, config.width, config.width, hidden])
    query, key, value, mlp_gate, mlp_value = jnp.split(y, ends, axis=-1)
    query = rms_norm(p, "attn.norm_q", to_heads(query, config), config.eps)
    key = rms_norm(p, "attn.norm_k", to_heads(key, config), config.eps)
    value = to_heads(value, config)
    seen = attention(rotate(query, rotation), rotate(key, rotation), value, attend)
    both = jnp.concatenate([seen, swiglu(mlp_gate, mlp_value)], axis=-1)
    return x + gate * add_up(linear(p, "attn.to_out", both))


def embed_time(
    p: dict, config: TransformerConfig, time: jax.Array, until: jax.Array | None = None
) -> jax.Array:
    """Embed the time, and for a flow map add the embedded time that it goes to: (batch, width)."""
    first = embed_number(p, TIME, config, time)
    if not config.guidance_embeds:
        if until is not None:
            raise ValueError(
                "This transformer is no flow map, and has no embedder for the time that a step "
                "goes to: leave `until` out."
            )
        return first
    if until is None:
        raise ValueError(
            "This transformer is a flow map, and has to be told the time that a step goes to: "
            "give `until`."
        )
    return first + embed_number(p, SECOND_TIME, config, until)


def embed_number(p: dict, name: str, config: TransformerConfig, number: jax.Array) -> jax.Array:
    """Sinusoidal embedding of a number from 0 to 1, and an MLP of two layers: (batch, width)."""
    half = config.timestep_guidance_channels // 2
    frequencies = 10_000.0 ** -(np.arange(half) / half)
    angles = 1000 * number.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return linear(p, f"{name}.linear_2", jax.nn.silu(linear(p, f"{name}.linear_1", waves)))


def modulation(p: dict, name: str, condition: jax.Array) -> list[jax.Array]:
    """adaLN: shift, scale and gate for one layer of a block or for two, each (batch, 1, width)."""
    values = linear(p, f"{name}.linear", condition)[:, None]
    return jnp.split(values, values.shape[-1] // condition.shape[-1], axis=-1)


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """adaLN: a layer norm whose scale and shift come from the time."""
    wide = x.astype(jnp.float32)
    # Not by the mean of squares, as ``course.model.layers.layer_norm`` has it: so the TPU compiler
    # needs half of the temporary memory for a step.
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    y = (centred * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)
    return y * (1 + scale) + shift


def feed_forward(p: dict, name: str, x: jax.Array) -> jax.Array:
    gate, value = jnp.split(linear(p, f"{name}.linear_in", x), 2, axis=-1)
    return linear(p, f"{name}.linear_out", swiglu(gate, value))


def heads(p: dict, name: str, x: jax.Array, config: TransformerConfig) -> jax.Array:
    return to_heads(linear(p, name, x), config)


def to_heads(x: jax.Array, config: TransformerConfig) -> jax.Array:
    """From (batch, tokens, heads * channels) to (batch, tokens, heads, channels)."""
    return x.reshape(*x.shape[:2], config.num_attention_heads, config.attention_head_dim)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, attend: Callable = automatic
) -> jax.Array:
    """Attention with scores in float32, whose heads are joined: (batch, tokens, width).

    All three are (batch, tokens, heads, channels).
    """
    y = attend(query, key, value, score_dtype=jnp.float32)
    return y.reshape(*y.shape[:2], -1)


def rotary(positions: np.ndarray, config: TransformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Give cosines and sines of rotary positions (Su et al., 2021), each (tokens, 1, half a head).

    Each of the four axes of a position turns some of a head's channels, with several frequencies.
    """
    angles = []
    for axis, channels in enumerate(config.axes_dims_rope):
        frequencies = config.rope_theta ** -(np.arange(0, channels, 2) / channels)
        angles.append(positions[:, axis, None] * frequencies)
    angles = np.concatenate(angles, axis=-1)[:, None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, rotation: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Turn each pair of neighbouring channels by the angle of the token's position."""
    cos, sin = rotation
    a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
