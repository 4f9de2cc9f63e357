"""The text encoder of CLIP: a vector for each token, and one for the whole prompt."""

import jax
import jax.numpy as jnp

from stable_diffusion import layers
from stable_diffusion.attention import plain
from stable_diffusion.configs import TextConfig
from stable_diffusion.layers import layer_norm, linear, parameter, quick_gelu

EMBEDDINGS = "text_model.embeddings.token_embedding.weight"


def encode_text(
    p: dict, config: TextConfig, ids: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
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
    hidden : list of jax.Array
        What each layer gets, and what the last one gives: each (batch, tokens, channels).
    last : jax.Array
        The last of these, normalized.
    pooled : jax.Array
        Of that the end token, (batch, channels), projected if the encoder projects.
    """
    width = config.hidden_size
    epsilon = config.layer_norm_eps
    heads = (*ids.shape, config.num_attention_heads, width // config.num_attention_heads)
    with jax.named_scope("text_encoder"):
        tokens = parameter(p, EMBEDDINGS, config.vocab_size, width)
        positions = parameter(
            p,
            "text_model.embeddings.position_embedding.weight",
            config.max_position_embeddings,
            width,
        )
        hidden = [tokens[ids] + positions]
        for n in range(config.num_hidden_layers):
            name = f"text_model.encoder.layers.{n}"
            x = hidden[-1]
            y = layer_norm(p, f"{name}.layer_norm1", x, epsilon)
            query = linear(p, f"{name}.self_attn.q_proj", y, width).reshape(heads)
            key = linear(p, f"{name}.self_attn.k_proj", y, width).reshape(heads)
            value = linear(p, f"{name}.self_attn.v_proj", y, width).reshape(heads)
            y = plain(query, key, value, causal=True).reshape(x.shape)
            x += linear(p, f"{name}.self_attn.out_proj", y, width)
            y = layer_norm(p, f"{name}.layer_norm2", x, epsilon)
            y = linear(p, f"{name}.mlp.fc1", y, config.intermediate_size)
            y = quick_gelu(y) if config.hidden_act == "quick_gelu" else layers.gelu(y)
            x += linear(p, f"{name}.mlp.fc2", y, width)
            hidden.append(x)
        last = layer_norm(p, "text_model.final_layer_norm", hidden[-1], epsilon)
        if config.eos_token_id == 2:  # in old configurations, which are wrong
            end = ids.argmax(axis=-1)  # the end token has the largest id of all
        else:
            end = (ids == config.eos_token_id).argmax(axis=-1)
        pooled = jnp.take_along_axis(last, end[:, None, None], axis=1)[:, 0]
        if config.projects:
            pooled = linear(p, "text_projection", pooled, config.projection_dim, bias=False)
    return hidden, last, pooled
