"""The text encoder: the first three quarters of a language model, Qwen3.

It was trained to continue texts. What its layers know of each token on the way serves to draw.
"""

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2.configs import TextConfig
from course.model.attention import plain
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

EMBEDDINGS = "model.embed_tokens.weight"
LAYERS = "model.layers"


def text_parameters(config: TextConfig, depth: int | None = None) -> dict[str, Parameter]:
    """Return shapes and logical axes of the parameters by name: of the layers that are used.

    ``depth`` says of how many layers instead.
    """
    width = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    wide = config.intermediate_size
    norm, head = rms_norm_parameters(width), rms_norm_parameters(config.head_dim)
    layer = within("input_layernorm", norm) | within("post_attention_layernorm", norm)
    layer |= within("self_attn.q_proj", matrix_parameters(width, queries, ("embed", "heads")))
    layer |= within("self_attn.k_proj", matrix_parameters(width, keys, ("embed", "heads")))
    layer |= within("self_attn.v_proj", matrix_parameters(width, keys, ("embed", "heads")))
    layer |= within("self_attn.o_proj", matrix_parameters(queries, width, ("heads", "embed")))
    layer |= within("self_attn.q_norm", head) | within("self_attn.k_norm", head)
    layer |= within("mlp.gate_proj", matrix_parameters(width, wide, ("embed", "mlp")))
    layer |= within("mlp.up_proj", matrix_parameters(width, wide, ("embed", "mlp")))
    layer |= within("mlp.down_proj", matrix_parameters(wide, width, ("mlp", "embed")))
    return {
        EMBEDDINGS: Parameter((config.vocab_size, width), ("vocabulary", "embed")),
        **stack_parameters(LAYERS, depth or config.read_layers[-1], layer),
    }


def encode_text(p: dict, config: TextConfig, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """transformers' ``Qwen3Model``, up to the last layer that is read.

    Parameters
    ----------
    p : dict
        The text encoder's parameters.
    config : TextConfig
    ids : jax.Array
        Token ids, int, (batch, tokens), with padding on the right.
    mask : jax.Array
        Which tokens are no padding: bool, (batch, tokens).

    Returns
    -------
    jax.Array
        What three layers give for each token, one behind the other: (batch, tokens, 3 * channels).
    """
    tokens = ids.shape[1]
    epsilon = config.rms_norm_eps
    rotation = rotary(tokens, config)
    group = config.num_attention_heads // config.num_key_value_heads
    # A token sees itself and those before it, and no padding.
    causal = np.tri(tokens, dtype=bool)
    visible = causal & mask.astype(bool)[:, None, None, :]

    def to_heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, config.head_dim)

    def layer(x: jax.Array, p: dict) -> tuple[jax.Array, jax.Array]:
        y = rms_norm(p, "input_layernorm", x, epsilon)
        query = to_heads(linear(p, "self_attn.q_proj", y))
        key = to_heads(linear(p, "self_attn.k_proj", y))
        value = to_heads(linear(p, "self_attn.v_proj", y))
        query = rotate(rms_norm(p, "self_attn.q_norm", query, epsilon), rotation)
        key = rotate(rms_norm(p, "self_attn.k_norm", key, epsilon), rotation)
        # Several heads of queries share one of keys and values (grouped-query attention).
        key, value = key.repeat(group, axis=2), value.repeat(group, axis=2)
        seen = plain(query, key, value, visible, score_dtype=jnp.float32)
        x += linear(p, "self_attn.o_proj", seen.reshape(*x.shape[:2], -1))
        y = rms_norm(p, "post_attention_layernorm", x, epsilon)
        hidden = swiglu(linear(p, "mlp.gate_proj", y), linear(p, "mlp.up_proj", y))
        x += linear(p, "mlp.down_proj", hidden)
        return x, x

    with jax.named_scope("text_encoder"):
        # The outputs of all layers: (layers, batch, tokens, channels).
        _, outputs = jax.lax.scan(layer, p[EMBEDDINGS][ids], stacked_layers(p, LAYERS))
        read = [outputs[number - 1] for number in config.read_layers]
        return jnp.concatenate(read, axis=-1)


def rotary(tokens: int, config: TextConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of the places 0, 1, 2, ..., each (tokens, 1, half a head)."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = (np.arange(tokens)[:, None] * frequencies)[:, None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, rotation: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Turn pairs of channels: here the first half of them is paired with the second."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
