"""Which files this course reads: the list that the site shows and that the tests go through."""

from collections.abc import Callable
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of file that people have."""

    group: str
    name: str  # for the tests
    what: str  # the file, in Markdown
    reads: bool
    how: str  # with what it reads, or what to do in place of that, in Markdown
    says: str = ""  # words out of the sentence by which it is refused


SINGLE = "One file with a whole model"
FOLDER = "A folder, or a repository on the Hub"
LORA = "LoRA and its relatives"
WORD = "New words (textual inversion)"
CONVERT = "`course.convert`"

KINDS = [
    Kind(
        SINGLE,
        "sd1",
        "Stable Diffusion 1 in float16, bfloat16 or float32, as most sites have it",
        True,
        f"{CONVERT}, with `--like` a folder or Hub id of Stable Diffusion 1",
    ),
    Kind(
        SINGLE,
        "ema",
        "the same not pruned: every number a second time as an average over the training "
        "(`model_ema.`), and numbers of the training, in any dtype",
        True,
        f"{CONVERT}; it leaves aside what is not used, averages too",
    ),
    Kind(
        SINGLE,
        "short-text",
        "the same with a text encoder called `transformer.embeddings`, without `text_model` (NAI)",
        True,
        CONVERT,
    ),
    Kind(
        SINGLE,
        "sd2",
        "Stable Diffusion 2, base, by the prefixes of the release or of later programs",
        True,
        f"{CONVERT}, with `--like` Stable Diffusion 2 base",
    ),
    Kind(
        SINGLE,
        "sd2-v",
        "Stable Diffusion 2 for 768 pixels, which predicts velocities",
        True,
        f"{CONVERT}, with `--like` Stable Diffusion 2 for 768 pixels, or `--prediction "
        "v_prediction`",
    ),
    Kind(
        SINGLE,
        "sd2-v-like-base",
        "the same, with `--like` the base model",
        False,
        "say `--prediction v_prediction`",
        "By its numbers it is v_prediction",
    ),
    Kind(SINGLE, "xl", "Stable Diffusion XL", True, f"{CONVERT}, with `--like` XL"),
    Kind(
        SINGLE,
        "xl-v",
        "XL with the keys `v_pred` and `ztsnr`, or `modelspec.prediction_type` in its header",
        True,
        f"{CONVERT} writes both into the scheduler's configuration, and the samplers follow it",
    ),
    Kind(
        SINGLE,
        "diffusers-names",
        "any of these by the names of diffusers (`unet.down_blocks…`)",
        True,
        CONVERT,
    ),
    Kind(
        SINGLE,
        "other-vae",
        "a VAE of its own, in either layout, as the one of XL that was made for float16",
        True,
        f"{CONVERT}, with `--vae` the file, the folder or the Hub id",
    ),
    Kind(
        SINGLE,
        "other-text",
        "a text encoder of its own (`text_model…`, or by OpenCLIP's names)",
        True,
        f"{CONVERT}, with `--text-encoder` or `--text-encoder-2` the file",
    ),
    Kind(
        SINGLE,
        "no-vae",
        "a model without a VAE",
        False,
        "give one by `--vae`",
        "has no vae in it",
    ),
    Kind(
        SINGLE,
        "only-unet",
        "a UNet alone",
        False,
        "with `--vae` and `--text-encoder` it reads",
        "has no vae and text_encoder in it",
    ),
    Kind(
        SINGLE,
        "wrong-kind",
        "a model of another kind than the folder behind `--like`",
        False,
        "the message says which kind it is, if its sizes tell",
        "it is for",
    ),
    Kind(
        SINGLE,
        "inpainting",
        "a model for inpainting, whose UNet has 9 channels in",
        False,
        "take the model that it was made of, and `course.sd.edit`",
        "as for inpainting",
    ),
    Kind(
        SINGLE,
        "edm",
        "Playground 2.5, CosXL and others with `edm_…` keys",
        False,
        "their noise is another; no sampler here knows it",
        "other amounts of noise (EDM)",
    ),
    Kind(
        SINGLE,
        "sd3-flux",
        "Stable Diffusion 3, FLUX.1, FLUX.2",
        False,
        "other models; chapter 13 names programs for them",
        "this model is Stable Diffusion 1, 2 or XL",
    ),
    Kind(
        SINGLE,
        "fp8",
        "numbers of 8 bits (fp8)",
        False,
        "get it in float16; `course.model.quantize` makes int8 of that",
        "numbers of 8 bits",
    ),
    Kind(
        SINGLE,
        "gguf",
        "GGUF",
        False,
        "get safetensors in float16",
        "is GGUF",
    ),
    Kind(
        SINGLE,
        "pickle",
        "`.ckpt`, `.pt`, `.pth`, `.bin`, and pickles under other names",
        False,
        "get safetensors. If there are none, convert it by diffusers on PyTorch, on a machine that "
        "holds nothing of yours",
        "is a pickle",
    ),
    Kind(
        SINGLE,
        "lfs",
        "the note of Git LFS in place of a file",
        False,
        "`git lfs pull`, or download it from its page",
        "only says where the file is",
    ),
    Kind(
        SINGLE,
        "page",
        "a web page in place of a file, as a download without a login gives it",
        False,
        "log in, and download it from its page",
        "is a web page",
    ),
    Kind(
        FOLDER,
        "folder",
        "Stable Diffusion 1, 2 or XL in diffusers' format with safetensors in float32, float16 or "
        "bfloat16, or Flax weights",
        True,
        "`course.sd.load`, `TUTORIAL_CHECKPOINT`, and all commands",
    ),
    Kind(
        FOLDER,
        "variant",
        "files with a variant in their names, as `model.fp16.safetensors`",
        True,
        '`course.sd.load(…, variant="fp16")`, `--variant fp16`',
    ),
    Kind(
        FOLDER,
        "shards",
        "parameters in several files, with an index",
        True,
        "as any folder",
    ),
    Kind(
        FOLDER,
        "hub",
        "a Hub id, as `owner/name` or `owner/name@revision`",
        True,
        "`TUTORIAL_CHECKPOINT` and the commands, or `helpers.find_folder`",
    ),
    Kind(
        FOLDER,
        "schedulers",
        "UniPC, DEIS, Euler a, Heun, DPM2, LMS, or Karras' steps in the scheduler's configuration",
        True,
        "the nearest of our samplers draws, and a warning says which",
    ),
    Kind(
        FOLDER,
        "flux2",
        "FLUX.2-klein in diffusers' format with safetensors, in one file or several",
        True,
        "`flux2.load`, and in chapter 16 `TUTORIAL_CHECKPOINT`; `helpers.find_folder` for a Hub "
        "id. It draws and edits in Python only: no command takes it, and no LoRA",
    ),
    Kind(
        FOLDER,
        "only-bin",
        "parameters as `.bin` alone",
        False,
        "get safetensors; on the Hub, another revision may have them",
        "as it is a pickle",
    ),
    Kind(
        FOLDER,
        "inpainting-folder",
        "a folder for inpainting or InstructPix2Pix",
        False,
        "take the model that it was made of, and `course.sd.edit`",
        "its UNet reads a picture",
    ),
    Kind(
        FOLDER,
        "other-pipeline",
        "another pipeline, as FLUX.1, FLUX.2-dev, LCM or ControlNet",
        False,
        "other models; chapter 13 names programs for them",
        "this model reads folders for",
    ),
    Kind(
        LORA,
        "kohya",
        "kohya's names (`lora_unet_…lora_down`), with LoCon's convolutions, for 1, 2 and XL (there "
        "by both namings of the UNet)",
        True,
        "`read_lora`, `course.lora`",
    ),
    Kind(
        LORA,
        "peft",
        "diffusers' and PEFT's names (`unet.…lora_A`), alpha in the header, rsLoRA too",
        True,
        "`read_lora`, `course.lora`",
    ),
    Kind(
        LORA,
        "peft-bare",
        "what PEFT saves itself (`base_model.model.…`), with `adapter_config.json` beside it",
        True,
        "`read_lora`, `course.lora`",
    ),
    Kind(
        LORA,
        "no-prefix",
        "names of layers without the part (`down_blocks…lora_A`)",
        True,
        "`read_lora`, `course.lora`",
    ),
    Kind(
        LORA,
        "old-diffusers",
        "names of old versions of diffusers (`processor.to_q_lora`, `lora_linear_layer`)",
        True,
        "`read_lora`, `course.lora`",
    ),
    Kind(
        LORA,
        "peft-no-config",
        "what PEFT saves itself, alone: its alpha is not known",
        False,
        "put `adapter_config.json` beside it",
        "does not say its alpha",
    ),
    Kind(
        LORA,
        "dora",
        "DoRA (`dora_scale`, `lora_magnitude_vector`)",
        False,
        "build it into a model by the program that it was made for, and read that model",
        "is DoRA",
    ),
    Kind(LORA, "loha", "LoHa (`hada_w1_a`)", False, "the same", "is LoHa"),
    Kind(LORA, "lokr", "LoKr (`lokr_w1`)", False, "the same", "is LoKr"),
    Kind(LORA, "tucker", "LoCon with `lora_mid`", False, "the same", "in three matrices (Tucker)"),
    Kind(
        LORA,
        "diff",
        "whole differences (`.diff`, `w_norm`), as LyCORIS writes for norms",
        False,
        "the same",
        "whole differences of weights",
    ),
    Kind(
        LORA,
        "bundle",
        "a LoRA with its words in the same file (`bundle_emb.`)",
        False,
        "get the words and the LoRA as two files",
        "new words in the same file",
    ),
    Kind(
        LORA,
        "other-model",
        "a LoRA for another model",
        False,
        "the message names the model, if the file tells",
        "fit nothing in this model",
    ),
    Kind(
        WORD,
        "word",
        "safetensors with the word for the array's name, as `<cat-toy>`, of one vector or several",
        True,
        "`read_embedding`",
    ),
    Kind(
        WORD,
        "emb-params",
        "safetensors with `emb_params`; the word is the file's name",
        True,
        "`read_embedding`",
    ),
    Kind(
        WORD,
        "xl-word",
        "safetensors for XL with `clip_l` and `clip_g`",
        True,
        "`read_embedding`",
    ),
    Kind(
        WORD,
        "wrong-word",
        "a word for another model",
        False,
        "take one for this model",
        "and this one has",
    ),
    Kind(
        WORD,
        "pt-word",
        "`.pt`",
        False,
        "get safetensors",
        "is a pickle",
    ),
]


COLUMNS = "file", "here", "how"
READS = "reads"
REFUSED = "refused: “… {} …”"


def table(group: str, translate: Callable[[str], str] = str) -> str:
    """The kinds of a group, in Markdown."""
    titles = " | ".join(translate(title) for title in COLUMNS)
    lines = [f"| {titles} |", "| --- | --- | --- |"]
    for kind in KINDS:
        if kind.group == group:
            here = translate(READS) if kind.reads else translate(REFUSED).format(kind.says)
            lines.append(f"| {translate(kind.what)} | {here} | {translate(kind.how)} |")
    return "\n".join(lines)


def page(translate: Callable[[str], str] = str) -> str:
    """All groups with their tables, in Markdown; ``translate`` gives each text in a language."""
    groups = dict.fromkeys(kind.group for kind in KINDS)
    return "\n\n".join(f"## {translate(group)}\n\n{table(group, translate)}" for group in groups)
