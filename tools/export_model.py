"""Write a checkpoint as ONNX files, for the page that draws: ``python -m tools.export_model CHECKPOINT FOLDER``.

It runs in an environment of its own, from locks/draw.lock, because jax2onnx brings many packages that nothing else
here needs. Weights are stored as float16, and computed with as float32.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax2onnx import to_onnx

import stable_diffusion
from stable_diffusion.pipeline import encode_prompts
from stable_diffusion.unet import read_text, unet
from stable_diffusion.vae import decode

LEAST = 1024  # numbers; smaller arrays stay float32


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, with large float32 weights stored as float16 and cast back when it is loaded."""
    graph, casts = model.graph, []
    for weight in list(graph.initializer):
        if weight.data_type != onnx.TensorProto.FLOAT or np.prod(weight.dims) < LEAST:
            continue
        half = onnx.numpy_helper.from_array(
            onnx.numpy_helper.to_array(weight).astype(np.float16), f"{weight.name}.half"
        )
        casts.append(onnx.helper.make_node("Cast", [half.name], [weight.name], to=onnx.TensorProto.FLOAT))
        graph.initializer.remove(weight)
        graph.initializer.append(half)
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder in diffusers' format")
    parser.add_argument("folder", type=Path, help="where the files go")
    options = parser.parse_args()
    params, config, tokenize = stable_diffusion.load(options.checkpoint)
    side, channels = config.unet.sample_size, config.unet.in_channels

    def text_encoder(ids):
        return encode_prompts(params, config, ids)[0]

    def denoiser(latents, timestep, context, guidance):
        """What the UNet predicts for one image, with guidance. The context is of the empty prompt and the prompt."""
        condition = read_text(params["unet"], config.unet, context)
        without, with_prompt = unet(params["unet"], config.unet, jnp.tile(latents, (2, 1, 1, 1)), timestep, condition)
        return (without + guidance * (with_prompt - without))[None]

    def decoder(latents):
        return decode(params["vae"], config.vae, latents)

    ids = jax.eval_shape(lambda: jnp.asarray(tokenize(["", ""])))
    latents, one = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, side, side, channels), (1,)))
    context = jax.eval_shape(text_encoder, ids)
    arguments = {text_encoder: [ids], denoiser: [latents, one, context, one], decoder: [latents]}
    for function, shapes in arguments.items():
        onnx.save(in_half(to_onnx(function, shapes)), options.folder / f"{function.__name__}.onnx")


if __name__ == "__main__":
    main()
