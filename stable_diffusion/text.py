"""The text encoder of CLIP: tokens to vectors, one for each token and one for the whole prompt."""

import jax
import jax.numpy as jnp

from stable_diffusion import layers
from stable_diffusion.attention import plain
from stable_diffusion.configs import TextConfig
from stable_diffusion.layers import layer_norm, linear, parameter


def encode_text(p: dict, config: TextConfig, ids: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """transformers' ``CLIPTextModel`` and ``CLIPTextModelWithProjection``, from token ids, int, (batch, tokens).

    It gives a list of what each layer gets, and what the last one gives, each (batch, tokens, channels); the last of
    these, normalized; and of that the end token, (batch, channels), projected if the encoder projects.
    """
    width, epsilon = config.hidden_size, config.layer_norm_eps
    heads = (*ids.shape, config.num_attention_heads, width // config.num_attention_heads)
    with jax.named_scope("text_encoder"):
        tokens = parameter(p, "text_model.embeddings.token_embedding.weight", config.vocab_size, width)
        places = parameter(p, "text_model.embeddings.position_embedding.weight", config.max_position_embeddings, width)
        hidden = [tokens[ids] + places]
        for n in range(config.num_hidden_layers):
            name, x = f"text_model.encoder.layers.{n}", hidden[-1]
            y = layer_norm(p, f"{name}.layer_norm1", x, epsilon)
            parts = (linear(p, f"{name}.self_attn.{part}_proj", y, width).reshape(heads) for part in "qkv")
            x += linear(p, f"{name}.self_attn.out_proj", plain(*parts, causal=True).reshape(x.shape), width)
            y = layer_norm(p, f"{name}.layer_norm2", x, epsilon)
            y = linear(p, f"{name}.mlp.fc1", y, config.intermediate_size)
            y = y * jax.nn.sigmoid(1.702 * y) if config.hidden_act == "quick_gelu" else layers.gelu(y)
            hidden.append(x + linear(p, f"{name}.mlp.fc2", y, width))
        last = layer_norm(p, "text_model.final_layer_norm", hidden[-1], epsilon)
        # Old configurations say that the end token is 2, which it is not: there it is the largest of all ids.
        end = ids.argmax(-1) if config.eos_token_id == 2 else (ids == config.eos_token_id).argmax(-1)
        pooled = jnp.take_along_axis(last, end[:, None, None], axis=1)[:, 0]
        if config.projects:
            pooled = linear(p, "text_projection", pooled, config.projection_dim, bias=False)
    return hidden, last, pooled
