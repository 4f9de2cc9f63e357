"""Write a small FLUX.2 as ONNX files, for the page that draws.

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
from onnx.external_data_helper import set_external_data

from course import flux2

SMALL = 1024  # arrays with fewer numbers stay float32
WEIGHTS = "transformer.weights"  # of drawing and of editing, whose programs differ


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


def share_weights(models: list[onnx.ModelProto], file: Path) -> None:
    """Move the large weights of models into one file, in which equal ones stand once."""
    places = {}
    with file.open("wb") as stream:
        for model in models:
            for weight in model.graph.initializer:
                values = weight.raw_data
                if len(values) < SMALL:
                    continue
                if values not in places:
                    places[values] = stream.tell()
                    stream.write(values)
                set_external_data(weight, file.name, places[values], len(values))
                weight.ClearField("raw_data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder in diffusers' format")
    parser.add_argument("folder", type=Path, help="where the files go")
    options = parser.parse_args()
    params, config, tokenize = flux2.load(options.checkpoint, jnp.float32)
    side = config.side
    rows, columns = flux2.size_in_tokens(config, side, side)
    own = flux2.positions(rows, columns)
    with_reference = np.concatenate([own, flux2.positions(rows, columns, reference=1)])

    def text_encoder(ids, mask):
        """What the transformer gets of a prompt: (1, tokens, joint_attention_dim)."""
        return flux2.encode_prompts(params, config, ids, mask)

    def encoder(image):
        """Tokens (1, tokens, channels) of an image (1, height, width, 3)."""
        return flux2.encode_images(params, config, image)

    def decoder(tokens):
        """An image (1, height, width, 3) of tokens (1, tokens, channels)."""
        return flux2.decode(params["vae"], config.vae, tokens, side, side)

    def velocity(tokens, text, times, places):
        transformer = params["transformer"]
        text_places = flux2.text_positions(text.shape[1])
        now, *until = times
        moved = flux2.velocity(
            transformer,
            config.transformer,
            tokens,
            text,
            now,
            places,
            text_places,
            until=until[0] if until else None,
        )
        return moved[:, : len(own)]

    def drawer(tokens, text, *times):
        """The velocity of an image's tokens (1, tokens, channels).

        Times are (1,): that of now, and for a flow map that which the step goes to.
        """
        return velocity(tokens, text, times, own)

    def editor(tokens, reference, text, *times):
        """The same, where tokens of another image are seen, too."""
        both = jnp.concatenate([tokens, reference], axis=1)
        return velocity(both, text, times, with_reference)

    ids, mask = tokenize([""])
    image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    time = jax.ShapeDtypeStruct((1,), jnp.float32)
    tokens = jax.eval_shape(encoder, image)
    text = jax.eval_shape(text_encoder, ids, mask)
    times = [time, time] if config.transformer.guidance_embeds else [time]
    inputs = {
        text_encoder: [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (ids, mask)],
        encoder: [image],
        decoder: [tokens],
        drawer: [tokens, text, *times],
        editor: [tokens, tokens, text, *times],
    }
    models = {}
    for function, shapes in inputs.items():
        models[function.__name__] = store_as_float16(to_onnx(function, shapes))
    share_weights([models["drawer"], models["editor"]], options.folder / WEIGHTS)
    for name, model in models.items():
        onnx.save(model, options.folder / f"{name}.onnx")


if __name__ == "__main__":
    main()
