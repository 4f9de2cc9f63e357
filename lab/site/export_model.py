"""Write a checkpoint as ONNX files, for the page that draws.

It runs as ``python -m lab.site.export_model CHECKPOINT FOLDER`` in an environment of its own, from
locks/draw.lock, because jax2onnx brings many packages that nothing else here needs.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax2onnx import to_onnx

from course import sd
from course.sd.pipeline import denoise_step, encode_prompts
from course.sd.unet import project_text
from course.sd.vae import decode

SMALL = 1024  # arrays with fewer numbers stay float32


def store_as_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store large float32 weights of a model as float16, which it casts back when it runs."""
    graph = model.graph
    casts = []
    for weight in list(graph.initializer):
        if weight.data_type != onnx.TensorProto.FLOAT or np.prod(weight.dims) < SMALL:
            continue
        values = onnx.numpy_helper.to_array(weight).astype(np.float16)
        half = onnx.numpy_helper.from_array(values, f"{weight.name}.half")
        graph.initializer.remove(weight)
        graph.initializer.append(half)
        cast = onnx.helper.make_node("Cast", [half.name], [weight.name], to=onnx.TensorProto.FLOAT)
        casts.append(cast)
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder in diffusers' format")
    parser.add_argument("folder", type=Path, help="where the files go")
    options = parser.parse_args()
    params, config, tokenize = sd.load(options.checkpoint)

    def text_encoder(ids):
        """Context (2, 77, width) of the ids (2, 77) of the empty prompt and the prompt."""
        return encode_prompts(params, config, ids)[0]

    def denoiser(latents, timestep, context, guidance):
        """The guided prediction (1, side, side, channels); timestep and guidance are (1,)."""
        condition = project_text(params["unet"], config.unet, context)
        return denoise_step(params, config, latents, timestep, condition, guidance)

    def decoder(latents):
        """Images (1, height, width, 3) of latents."""
        return decode(params["vae"], config.vae, latents)

    side = config.unet.sample_size
    ids = jax.eval_shape(lambda: jnp.asarray(tokenize(["", ""])))
    latents = jax.ShapeDtypeStruct((1, side, side, config.unet.in_channels), jnp.float32)
    number = jax.ShapeDtypeStruct((1,), jnp.float32)
    context = jax.eval_shape(text_encoder, ids)
    inputs = {
        text_encoder: [ids],
        denoiser: [latents, number, context, number],
        decoder: [latents],
    }
    for function, shapes in inputs.items():
        model = store_as_float16(to_onnx(function, shapes))
        onnx.save(model, options.folder / f"{function.__name__}.onnx")


if __name__ == "__main__":
    main()
