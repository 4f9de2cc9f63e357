"""Z-Image-Turbo's transformer: a second model of the layers of FLUX.2's.

Two blocks refine the image by itself, and two the text. Then both are one sequence, for thirty
blocks, all of one kind. FLUX.2's blocks share what the time says to them; here each block has a
small matrix of its own for it, which scales and gates, and does not shift. The blocks of the text
are not told the time.

Model, names and numbers are those of Tongyi-MAI/Z-Image-Turbo on the Hub, whose text encoder is
Qwen3-4B, and whose VAE is an ``AutoencoderKL`` of 16 channels. Only the transformer is here:
``course.flux2.text`` reads other layers of Qwen3, and the VAE of ``course.sd`` is another kind.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2.layers import (
    Parameter,
    attention,
    layer_norm,
    linear,
    linear_parameters,
    rms_norm,
    scan_blocks,
    stack_parameters,
    swiglu,
    within,
)
from course.flux2.transformer import rotate

PATCH = 2  # latents high and wide, of which a token is made
MULTIPLE = 32  # of which image and prompt fill up their numbers of tokens
FREQUENCIES, TIME_CHANNELS = 256, 1024  # of the two layers that embed the time
IMAGE, TEXT, BOTH = "noise_refiner", "context_refiner", "layers"
EMBEDDER, FINAL = "all_x_embedder.2-1", "all_final_layer.2-1"  # for patches of 2 x 2, 1 frame


@dataclass(frozen=True)
class ZImageConfig:
    """diffusers' ``ZImageTransformer2DModel``: the defaults are Z-Image-Turbo's."""

    in_channels: int = 16  # of the latents
    dim: int = 3840
    n_layers: int = 30  # blocks of image and text together
    n_refiner_layers: int = 2  # blocks of the image, and as many of the text
    n_heads: int = 30
    norm_eps: float = 1e-5
    cap_feat_dim: int = 2560  # of a token of the text: the text encoder's last layer but one
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1536, 512, 512)  # how many positions each axis has

    @property
    def condition_channels(self) -> int:
        """Of what the time says."""
        return min(self.dim, 256)

    @property
    def mlp_channels(self) -> int:
        return int(self.dim / 3 * 8)


def z_image_parameters(config: ZImageConfig) -> dict[str, Parameter]:
    """Shapes and logical axes of the transformer's parameters, by name.

    Heads are whole on each device only where the devices divide their number, which is 30.
    """
    width = config.dim
    condition = config.condition_channels
    patch = PATCH**2 * config.in_channels
    norm = {"weight": Parameter((width,), (None,))}
    head = {"weight": Parameter((width // config.n_heads,), (None,))}

    block = {}
    for name in ("to_q", "to_k", "to_v"):
        block |= within(f"attention.{name}", linear_parameters(width, width, ("embed", "heads")))
    block |= within("attention.to_out.0", linear_parameters(width, width, ("heads", "embed")))
    block |= within("attention.norm_q", head) | within("attention.norm_k", head)
    hidden = config.mlp_channels
    for name in ("w1", "w3"):
        block |= within(f"feed_forward.{name}", linear_parameters(width, hidden, ("embed", "mlp")))
    block |= within("feed_forward.w2", linear_parameters(hidden, width, ("mlp", "embed")))
    for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        block |= within(name, norm)
    modulated = block | within("adaLN_modulation.0", with_bias(condition, 4 * width))

    found = within(EMBEDDER, with_bias(patch, width, (None, "embed")))
    found |= within("cap_embedder.0", {"weight": Parameter((config.cap_feat_dim,), (None,))})
    found |= within("cap_embedder.1", with_bias(config.cap_feat_dim, width, (None, "embed")))
    for name in ("x_pad_token", "cap_pad_token"):
        found[name] = Parameter((1, width), (None, "embed"))
    found |= within("t_embedder.mlp.0", with_bias(FREQUENCIES, TIME_CHANNELS))
    found |= within("t_embedder.mlp.2", with_bias(TIME_CHANNELS, condition))
    found |= stack_parameters(IMAGE, config.n_refiner_layers, modulated)
    found |= stack_parameters(TEXT, config.n_refiner_layers, block)
    found |= stack_parameters(BOTH, config.n_layers, modulated)
    found |= within(f"{FINAL}.adaLN_modulation.1", with_bias(condition, width))
    return found | within(f"{FINAL}.linear", with_bias(width, patch, ("embed", None)))


def with_bias(
    inputs: int, outputs: int, axes: tuple[str | None, str | None] = (None, None)
) -> dict[str, Parameter]:
    return linear_parameters(inputs, outputs, axes) | {"bias": Parameter((outputs,), axes[1:])}


def velocity(
    p: dict,
    config: ZImageConfig,
    latents: jax.Array,
    text: jax.Array,
    mask: jax.Array,
    time: jax.Array,
) -> jax.Array:
    """diffusers' ``ZImageTransformer2DModel``: noise minus data, as the model predicts it.

    Time and sign are those of ``flux2.velocity``, so that ``flux2.euler`` follows either. In
    diffusers' model both are reversed: its time goes from 0, which is noise, to 1, which is data,
    and it predicts data minus noise. Its pipeline turns them round, and so does this function.

    diffusers fills up each prompt and each image to a multiple of 32 tokens: prompts by
    ``cap_pad_token``, at the positions that follow, and images by ``x_pad_token``, all at the
    position (0, 0, 0). Both tokens were learned, and attention sees them as it sees any other. What
    a prompt has beyond its own multiple of 32, since others in the batch are longer, is masked.
    This function does the same, so that an image does not depend on the length of the padding.

    Parameters
    ----------
    p : dict
        The transformer's parameters.
    config : ZImageConfig
    latents : jax.Array
        Noisy, with the VAE's scale and shift: (batch, height, width, in_channels).
    text : jax.Array
        Prompts, of which each has a token or more, with padding on the right to one length:
        (batch, text tokens, cap_feat_dim). The length is a multiple of 32.
    mask : jax.Array
        Which tokens are no padding: bool, (batch, text tokens).
    time : jax.Array
        From 0, which is data, to 1, which is noise: (batch,).

    Returns
    -------
    jax.Array
        (batch, height, width, in_channels), float32.

    Raises
    ------
    ValueError
        If height or width is odd, if the text's length is not a multiple of 32, or if the model
        has fewer positions than text and image need.
    """
    check_sizes(config, latents, text)
    rows, columns = latents.shape[1] // PATCH, latents.shape[2] // PATCH
    tokens = rows * columns
    filling = fill_up(tokens) - tokens

    # Which keys are seen: (batch, 1, 1, keys).
    lengths = fill_up(mask.sum(axis=1))
    seen_text = (np.arange(text.shape[1]) < lengths[:, None])[:, None, None]
    before = ((0, 0), (0, 0), (0, 0), (tokens + filling, 0))
    seen_both = jnp.pad(seen_text, before, constant_values=True)

    image_positions, text_positions = positions(lengths, text.shape[1], rows, columns)
    both_positions = jnp.concatenate([image_positions, text_positions], axis=1)
    condition = embed_time(p, config, time)

    image = linear(p, EMBEDDER, to_patches(latents))
    pad_tokens = jnp.broadcast_to(p["x_pad_token"], (len(image), filling, config.dim))
    image = jnp.concatenate([image, pad_tokens], axis=1)
    image = run_blocks(p, config, IMAGE, image, image_positions, condition)

    text = linear(p, "cap_embedder.1", rms_norm(p, "cap_embedder.0", text, config.norm_eps))
    text = jnp.where(mask[..., None], text, p["cap_pad_token"])
    text = run_blocks(p, config, TEXT, text, text_positions, seen=seen_text)

    both = jnp.concatenate([image, text], axis=1)
    both = run_blocks(p, config, BOTH, both, both_positions, condition, seen_both)
    scale = 1 + linear(p, f"{FINAL}.adaLN_modulation.1", jax.nn.silu(condition))[:, None]
    moved = linear(p, f"{FINAL}.linear", layer_norm(both[:, :tokens], 1e-6) * scale)
    return -to_latents(moved, rows, columns).astype(jnp.float32)


def run_blocks(
    p: dict,
    config: ZImageConfig,
    name: str,
    x: jax.Array,
    positions: jax.Array,
    condition: jax.Array | None = None,
    seen: jax.Array | None = None,
) -> jax.Array:
    """All blocks of a name, one after another. Without a condition, they are not modulated."""
    epsilon = config.norm_eps
    rotation = rotary(positions, config)

    def heads(p: dict, name: str, x: jax.Array) -> jax.Array:
        return linear(p, name, x).reshape(*x.shape[:2], config.n_heads, -1)

    def block(p: dict, x: jax.Array) -> jax.Array:
        scale, gate, mlp_scale, mlp_gate = modulation(p, condition)
        y = rms_norm(p, "attention_norm1", x, epsilon) * scale
        query = rms_norm(p, "attention.norm_q", heads(p, "attention.to_q", y), epsilon)
        key = rms_norm(p, "attention.norm_k", heads(p, "attention.to_k", y), epsilon)
        value = heads(p, "attention.to_v", y)
        y = attention(rotate(query, rotation), rotate(key, rotation), value, seen)
        y = linear(p, "attention.to_out.0", y)
        x += gate * rms_norm(p, "attention_norm2", y, epsilon)

        y = rms_norm(p, "ffn_norm1", x, epsilon) * mlp_scale
        y = swiglu(linear(p, "feed_forward.w1", y), linear(p, "feed_forward.w3", y))
        y = linear(p, "feed_forward.w2", y)
        return x + mlp_gate * rms_norm(p, "ffn_norm2", y, epsilon)

    with jax.named_scope(name):
        return scan_blocks(block, p, name, x)


def check_sizes(config: ZImageConfig, latents: jax.Array, text: jax.Array) -> None:
    """Refuse sizes that the model does not take."""
    _, height, width, _ = latents.shape
    tokens = text.shape[1]
    if height % PATCH or width % PATCH:
        raise ValueError(f"There are {height} x {width} latents: choose even numbers.")
    if tokens % MULTIPLE:
        raise ValueError(f"Prompts are padded to {tokens} tokens: choose a multiple of {MULTIPLE}.")
    # On the first axis the text begins at 1, and the image comes after it.
    needed = (tokens + 2, height // PATCH, width // PATCH)
    if any(count > most for count, most in zip(needed, config.axes_lens, strict=True)):
        raise ValueError(
            f"Text and image need {needed} positions on the three axes, and the model has "
            f"{config.axes_lens}: pad prompts to fewer tokens, or draw a smaller image."
        )


def fill_up(tokens: int | jax.Array) -> int | jax.Array:
    """The next multiple of 32.

    >>> fill_up(32), fill_up(33)
    (32, 64)
    """
    return -(-tokens // MULTIPLE) * MULTIPLE


def positions(
    lengths: jax.Array, text_tokens: int, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Where the tokens of image and text are, on three axes: each (batch, tokens, 3).

    A prompt's tokens have 1, 2, 3, ... on the first axis. All tokens of the image have the number
    after the prompt's length there, and their row and column on the other two.

    >>> image, text = positions(jnp.array([32]), 64, rows=4, columns=8)
    >>> image[0, :2].tolist(), text[0, :2].tolist()
    ([[33, 0, 0], [33, 0, 1]], [[1, 0, 0], [2, 0, 0]])
    """
    after_text = 1 + lengths[:, None, None]
    image = jnp.stack(jnp.broadcast_arrays(after_text, *np.indices((rows, columns))), axis=-1)
    tokens = rows * columns
    image = image.reshape(len(lengths), tokens, 3)
    image = jnp.pad(image, ((0, 0), (0, fill_up(tokens) - tokens), (0, 0)))
    text = np.zeros((len(lengths), text_tokens, 3), np.int32)
    text[:, :, 0] = 1 + np.arange(text_tokens)
    return image, jnp.asarray(text)


def rotary(positions: jax.Array, config: ZImageConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary positions (Su et al., 2021): (batch, tokens, 1, half a head).

    Each of the three axes of a position turns some of a head's channels, with several frequencies.
    """
    angles = []
    for axis, channels in enumerate(config.axes_dims):
        frequencies = config.rope_theta ** -(np.arange(0, channels, 2) / channels)
        angles.append(positions[..., axis, None] * np.float32(frequencies))
    angles = jnp.concatenate(angles, axis=-1)[:, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def embed_time(p: dict, config: ZImageConfig, time: jax.Array) -> jax.Array:
    """Waves of many frequencies at diffusers' time, and two layers: (batch, channels)."""
    half = FREQUENCIES // 2
    frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / half)
    angles = config.t_scale * (1 - time.astype(jnp.float32))[:, None] * frequencies
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return linear(p, "t_embedder.mlp.2", jax.nn.silu(linear(p, "t_embedder.mlp.0", waves)))


def modulation(p: dict, condition: jax.Array | None) -> tuple[jax.Array | int, ...]:
    """A block's scale and gate for attention, then for the feed-forward layer.

    Each is (batch, 1, dim), or 1 without a condition.
    """
    if condition is None:
        return 1, 1, 1, 1
    values = linear(p, "adaLN_modulation.0", condition)[:, None]
    scale, gate, mlp_scale, mlp_gate = jnp.split(values, 4, axis=-1)
    return 1 + scale, jnp.tanh(gate), 1 + mlp_scale, jnp.tanh(mlp_gate)


def to_patches(latents: jax.Array) -> jax.Array:
    """Tokens of 2 x 2 latents each: (batch, rows * columns, 4 * channels)."""
    batch, height, width, channels = latents.shape
    rows, columns = height // PATCH, width // PATCH
    x = latents.reshape(batch, rows, PATCH, columns, PATCH, channels).swapaxes(2, 3)
    return x.reshape(batch, rows * columns, PATCH**2 * channels)


def to_latents(tokens: jax.Array, rows: int, columns: int) -> jax.Array:
    """The reverse: (batch, height, width, channels)."""
    x = tokens.reshape(len(tokens), rows, columns, PATCH, PATCH, -1).swapaxes(2, 3)
    return x.reshape(len(tokens), rows * PATCH, columns * PATCH, -1)
