// Draws with the bundled checkpoint in the reader's browser. The model is chapter 11's, exported to ONNX; everything
// around it is here: tokens, noise, the steps of DDIM, and the page. Before Draw is pressed, this script loads only
// settings.json and one sheet of recorded images.

// The page's own language: texts by the English ones, {0} and so on being what is put in.
const words = JSON.parse(document.getElementById("draw-texts").textContent);
const t = (text, ...values) => (words[text] ?? text).replace(/\{(\d)\}/g, (_, k) => values[k]);
const here = (name) => new URL(name, import.meta.url);
const form = document.getElementById("draw");
const field = form.elements;
const progress = form.querySelector("progress");
const canvas = form.querySelector("canvas");
const said = document.getElementById("draw-said");
const recorded = document.getElementById("draw-recorded");
let settings; // what the checkpoint knows
let model; // three sessions, once they are loaded
let running = null; // the AbortController of the drawing that runs

// ---- Tokens: CLIP's, as chapter 2's tokenizer makes them

// Each byte as a visible character: the vocabularies of GPT-2 and CLIP are written in these.
const SIGNS = (() => {
  const signs = new Map();
  for (let byte = 0, next = 256; byte < 256; byte++) {
    const seen = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    signs.set(byte, String.fromCodePoint(seen ? byte : next++));
  }
  return signs;
})();

function tokenize(caption) {
  const ranks = new Map(settings.merges.map((pair, rank) => [pair.join(" "), rank]));
  const { vocabulary, tokens } = settings;
  const [start, end] = [vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"]];
  const ids = [];
  const pattern = /'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+/gu;
  for (const [word] of caption.normalize("NFC").toLowerCase().matchAll(pattern)) {
    let parts = [...new TextEncoder().encode(word)].map((byte) => SIGNS.get(byte));
    parts[parts.length - 1] += "</w>";
    for (;;) {
      const rank = (k) => ranks.get(`${parts[k]} ${parts[k + 1]}`) ?? Infinity;
      const best = parts.map((_, k) => k).reduce((a, b) => (rank(b) < rank(a) ? b : a), 0);
      if (rank(best) === Infinity) break;
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
    ids.push(...parts.map((part) => vocabulary[part] ?? end));
  }
  const all = [start, ...ids.slice(0, tokens - 2), end];
  return [...all, ...Array(tokens - all.length).fill(end)];
}

// ---- Noise: jax.random.normal(jax.random.key(seed)), so that a seed draws here what it draws in the chapters

// Threefry (Salmon et al., 2011), on two 32-bit numbers.
function threefry(seed, low) {
  const key = [0, seed, seed ^ 0x1bd11bda];
  const turns = [[13, 15, 26, 6], [17, 29, 16, 24]];
  let [a, b] = [key[0], (low + key[1]) | 0];
  for (let round = 0; round < 5; round++) {
    for (const turn of turns[round % 2]) {
      a = (a + b) | 0;
      b = ((b << turn) | (b >>> (32 - turn))) ^ a;
    }
    a = (a + key[(round + 1) % 3]) | 0;
    b = (b + key[(round + 2) % 3] + round + 1) | 0;
  }
  return (a ^ b) >>> 0;
}

// The inverse of the error function (Giles, 2012), which turns uniform random numbers into normal ones.
function inverseErf(x) {
  let w = -Math.log1p(-x * x);
  const near = w < 5;
  w = near ? w - 2.5 : Math.sqrt(w) - 3;
  const factors = near
    ? [2.81022636e-8, 3.43273939e-7, -3.5233877e-6, -4.39150654e-6, 0.00021858087, -0.00125372503, -0.00417768164,
       0.246640727, 1.50140941]
    : [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
       1.00167406, 2.83297682];
  return x * factors.reduce((sum, factor) => sum * w + factor, 0);
}

function noise(seed, side = 8, channels = 4) {
  const latents = new Float32Array(side * side * channels);
  for (let k = 0; k < latents.length; k++) {
    const uniform = ((threefry(seed, k) >>> 9) / 2 ** 23) * 2 - 0.99999994;
    const [channel, pixel] = [Math.floor(k / side ** 2), k % side ** 2]; // drawn with channels first
    latents[pixel * channels + channel] = Math.SQRT2 * inverseErf(Math.fround(uniform));
  }
  return latents;
}

// ---- Files

class Failure extends Error {} // its message is for the reader

function hasSimd() {
  const program = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];
  return typeof WebAssembly === "object" && WebAssembly.validate(new Uint8Array(program));
}

async function load(signal) {
  if (!hasSimd()) throw new Failure(t("This browser has no WebAssembly with SIMD: a newer one can draw."));
  const total = Object.values(settings.bytes).reduce((a, b) => a + b, 0);
  let loaded = 0;
  progress.hidden = false;
  const files = {};
  for (const name of Object.keys(settings.bytes)) {
    const explain = (error) => {
      throw signal.aborted ? error : new Failure(t("{0} could not be loaded: is there a network? Press Draw again.", name));
    };
    const answer = await fetch(here(name), { signal }).catch(explain);
    if (!answer.ok) throw new Failure(t("{0} could not be loaded ({1}). Press Draw again later.", name, answer.status));
    const chunks = [];
    for (const reader = answer.body.getReader(); ; ) {
      const { done, value } = await reader.read().catch(explain);
      if (done) break;
      chunks.push(value);
      loaded += value.length;
      progress.value = loaded / total;
      say(t("Loading {0} of {1} MB …", (loaded / 1e6).toFixed(1), (total / 1e6).toFixed(1)));
    }
    files[name] = new Uint8Array(await new Blob(chunks).arrayBuffer());
  }
  const runtime = await import(here("ort.wasm.bundle.min.mjs"));
  runtime.env.wasm.numThreads = 1; // more need headers that a plain host of files does not send
  runtime.env.wasm.wasmBinary = files["ort-wasm-simd-threaded.wasm"];
  const sessions = { Tensor: runtime.Tensor };
  for (const name of ["text_encoder", "denoiser", "decoder"]) {
    sessions[name] = await runtime.InferenceSession.create(files[`${name}.onnx`]);
  }
  progress.hidden = true;
  return sessions;
}

async function run(name, ...inputs) {
  const session = model[name];
  const results = await session.run(Object.fromEntries(session.inputNames.map((input, k) => [input, inputs[k]])));
  return results[session.outputNames[0]].data;
}

// ---- Drawing: DDIM (Song et al., 2020), as course/sd/samplers.py has it

async function draw({ caption, seed, steps, guidance }, signal, show) {
  const numbers = (values, shape) => new model.Tensor("float32", Float32Array.from(values), shape);
  const ids = Int32Array.from([...tokenize(""), ...tokenize(caption)]);
  const text = await run("text_encoder", new model.Tensor("int32", ids, [2, 1, settings.tokens]));
  const context = numbers(text, [2, settings.tokens, text.length / settings.tokens / 2]);
  const jump = Math.floor(settings.alphas.length / steps);
  let latents = noise(seed);
  for (let step = 0; step < steps; step++) {
    const timestep = (steps - 1 - step) * jump + settings.offset;
    const [alpha, next] = [settings.alphas[timestep], timestep < jump ? 1 : settings.alphas[timestep - jump]];
    const shaped = numbers(latents, [1, 8, 8, 4]);
    const v = await run("denoiser", shaped, numbers([timestep], [1]), context, numbers([guidance], [1]));
    const [a, b, c, d] = [alpha, 1 - alpha, next, 1 - next].map(Math.sqrt);
    // What the model predicts, v, is a mix of image and noise (Salimans and Ho, 2022).
    latents = latents.map((x, k) => c * (a * x - b * v[k]) + d * (a * v[k] + b * x));
    show(await run("decoder", numbers(latents, [1, 8, 8, 4])), step + 1);
    await new Promise((resume) => setTimeout(resume)); // lets the page show it, and take a click on Cancel
    signal.throwIfAborted();
  }
}

function paint(values) {
  const pixels = new ImageData(canvas.width, canvas.height);
  for (let k = 0; k < values.length / 3; k++) {
    for (let color = 0; color < 3; color++) pixels.data[4 * k + color] = Math.round(255 * values[3 * k + color]);
    pixels.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// ---- The page

// What Draw draws first is among the recorded images, and stands there from the start.
function showRecorded() {
  const sliders = [...recorded.querySelectorAll("input")];
  const [columns, rows] = sliders.map((slider) => slider.dataset.numbers.split(", "));
  const [column, row] = [columns.indexOf(field.steps.value), rows.indexOf(field.guidance.value)];
  const [caption, sheet] = [field.caption.value, new Image()];
  sheet.addEventListener("load", () => {
    if (running || model) return;
    const { width, height } = canvas;
    canvas.getContext("2d").drawImage(sheet, column * width, row * height, width, height, 0, 0, width, height);
    canvas.setAttribute("aria-label", caption);
  });
  sheet.src = here("recorded-0.webp");
}

function say(text) {
  said.textContent = text;
}

function compose() {
  const { size, color, shape, background } = Object.fromEntries(new FormData(form));
  const article = (word) => (/^[aeiou]/.test(word) ? "an" : "a");
  const words = [size, color, shape].filter(Boolean);
  if (shape) words.unshift(article(words[0]));
  if (background) words.push(...(words.length ? ["on"] : []), article(background), background, "background");
  field.caption.value = words.join(" ");
  check();
}

function check() {
  const words = new Set(field.caption.value.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? []);
  const unknown = [...words].filter((word) => !settings.words.includes(word));
  const known = t("It knows these words: {0}.", settings.words.join(", "));
  document.getElementById("draw-words").textContent = unknown.length
    ? t("The checkpoint never saw {0}, so expect nothing sensible. {1}", unknown.join(", "), known) : "";
}

async function submit() {
  if (running) return; // a second request does not wait behind the first
  running = new AbortController();
  field.cancel.disabled = false;
  const caption = field.caption.value;
  const [seed, steps, guidance] = ["seed", "steps", "guidance"].map((name) => Number(field[name].value));
  try {
    model ??= await load(running.signal);
    const start = performance.now();
    canvas.setAttribute("aria-label", t("Being drawn: {0}", caption));
    await draw({ caption, seed, steps, guidance }, running.signal, (values, step) => {
      paint(values);
      say(t("Step {0} of {1}", step, steps));
    });
    canvas.setAttribute("aria-label", caption);
    const seconds = ((performance.now() - start) / 1000).toFixed(1);
    say(t("Drawn in {0} s, all of it in your browser.", seconds));
  } catch (error) {
    canvas.setAttribute("aria-label", t("Not finished: {0}", caption));
    if (running.signal.aborted) say(t("Cancelled."));
    else {
      // A browser has different errors for too little memory, and the runtime puts them into text.
      const memory = error instanceof RangeError || /memory|allocat/i.test(error.message);
      const why = memory
        ? t("There is too little memory for the model: close other tabs.") : t("Drawing failed: {0}.", error.message);
      say(t("{0} These images were recorded:", error instanceof Failure ? error.message : why));
      recorded.hidden = false;
    }
  } finally {
    progress.hidden = true;
    field.cancel.disabled = true;
    running = null;
  }
}

async function begin() {
  const answer = await fetch(here("settings.json"));
  if (!answer.ok) return; // the recorded images stay
  settings = await answer.json();
  if (Object.keys(settings.bytes).length < 4) return; // the site was built without the model or its runtime
  for (const name of ["size", "color", "shape", "background"]) {
    for (const word of settings.choices[name === "background" ? "color" : name]) field[name].add(new Option(word));
    field[name].addEventListener("change", compose);
  }
  Object.assign(field.size, { value: "large" });
  Object.assign(field.color, { value: "red" });
  Object.assign(field.shape, { value: "heart" });
  Object.assign(field.background, { value: "white" });
  for (const name of ["seed", "steps", "guidance"]) {
    const show = () => (field[`${name}-value`].value = field[name].value);
    field[name].addEventListener("input", show);
    show();
  }
  field.caption.addEventListener("input", check);
  field.cancel.addEventListener("click", () => running?.abort());
  form.addEventListener("submit", (event) => (event.preventDefault(), submit()));
  compose();
  showRecorded();
  const total = Object.values(settings.bytes).reduce((a, b) => a + b, 0);
  say(t("Draw loads {0} MB the first time.", (total / 1e6).toFixed(0)));
  form.hidden = false;
  recorded.hidden = true;
}

begin();
