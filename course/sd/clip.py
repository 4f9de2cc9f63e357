"""The text encoder of CLIP: a vector for each token, and one for the whole prompt."""

import jax
import jax.numpy as jnp
import numpy as np

from course.model import layers
from course.model.attention import plain
from course.model.layers import (
    Parameter,
    layer_norm,
    linear,
    linear_parameters,
    matrix_parameters,
    norm_parameters,
    stack_parameters,
    stacked_layers,
    within,
)
from course.sd.configs import TextConfig

EMBEDDINGS = "text_model.embeddings.token_embedding.weight"
POSITIONS = "text_model.embeddings.position_embedding.weight"
LAYERS = "text_model.encoder.layers"


def text_parameters(config: TextConfig) -> dict[str, Parameter]:
    """Return shapes and logical axes of a text encoder's parameters, by name."""
    width = config.hidden_size
    layer = within("layer_norm1", norm_parameters(width))
    for name in ("q_proj", "k_proj", "v_proj"):
        layer |= within(f"self_attn.{name}", linear_parameters(width, width, ("embed", "heads")))
    layer |= within("self_attn.out_proj", linear_parameters(width, width, ("heads", "embed")))
    layer |= within("layer_norm2", norm_parameters(width))
    wide = config.intermediate_size
    layer |= within("mlp.fc1", linear_parameters(width, wide, ("embed", "mlp")))
    layer |= within("mlp.fc2", linear_parameters(wide, width, ("mlp", "embed")))
    parameters = {
        EMBEDDINGS: Parameter((config.vocab_size, width), ("vocabulary", "embed")),
        POSITIONS: Parameter((config.max_position_embeddings, width), (None, "embed")),
        **stack_parameters(LAYERS, config.num_hidden_layers, layer),
        **within("text_model.final_layer_norm", norm_parameters(width)),
    }
    if config.projects:
        parameters |= within("text_projection", matrix_parameters(width, config.projection_dim))
    return parameters


def encode_text(
    p: dict, config: TextConfig, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """transformers' ``CLIPTextModel`` and ``CLIPTextModelWithProjection``.

    Parameters
    ----------
    p : dict
        The text encoder's parameters.
    config : TextConfig
    ids : jax.Array
        Token ids, int, (batch, tokens).

    Returns
    -------
    hidden : jax.Array
        What each layer gets, and what the last one gives: (layers + 1, batch, tokens, channels).
    last : jax.Array
        The last of these, normalized.
    pooled : jax.Array
        Of that the end token, (batch, channels), projected if the encoder projects.
    """
    width = config.hidden_size
    epsilon = config.layer_norm_eps
    heads = (*ids.shape, config.num_attention_heads, width // config.num_attention_heads)
    activation = quick_gelu if config.hidden_act == "quick_gelu" else layers.gelu
    causal = np.tri(ids.shape[1], dtype=bool)  # a token sees itself and those before it

    def layer(x: jax.Array, p: dict) -> tuple[jax.Array, jax.Array]:
        y = layer_norm(p, "layer_norm1", x, epsilon)
        query = linear(p, "self_attn.q_proj", y).reshape(heads)
        key = linear(p, "self_attn.k_proj", y).reshape(heads)
        value = linear(p, "self_attn.v_proj", y).reshape(heads)
        y = plain(query, key, value, causal).reshape(x.shape)
        x += linear(p, "self_attn.out_proj", y)
        y = layer_norm(p, "layer_norm2", x, epsilon)
        x += linear(p, "mlp.fc2", activation(linear(p, "mlp.fc1", y)))
        return x, x

    with jax.named_scope("text_encoder"):
        x = p[EMBEDDINGS][ids] + p[POSITIONS]
        _, outputs = jax.lax.scan(layer, x, stacked_layers(p, LAYERS))
        hidden = jnp.concatenate([x[None], outputs])
        last = layer_norm(p, "text_model.final_layer_norm", hidden[-1], epsilon)
        if config.eos_token_id == 2:  # in old configurations, which are wrong
            end = ids.argmax(axis=-1)  # the end token has the largest id of all
        else:
            end = (ids == config.eos_token_id).argmax(axis=-1)
        pooled = jnp.take_along_axis(last, end[:, None, None], axis=1)[:, 0]
        if config.projects:
            pooled = linear(p, "text_projection", pooled)
    return hidden, last, pooled


def quick_gelu(x: jax.Array) -> jax.Array:
    """transformers' ``QuickGELUActivation``, which approximates GELU by a sigmoid."""
    return x * jax.nn.sigmoid(1.702 * x)
