// Draws and edits with a bundled checkpoint in the reader's browser. The model is chapter 16's with the weights of
// chapter 17, exported to ONNX; everything around it is here: tokens, noise, the steps of Euler's method, and the page.
// Before Draw is pressed, this script loads only settings.json and two small sheets of images.

// The page's own language: texts by the English ones, {0} and so on being what is put in.
const words = JSON.parse(document.getElementById("draw-texts").textContent);
const t = (text, ...values) => (words[text] ?? text).replace(/\{(\d)\}/g, (_, k) => values[k]);
const here = (name) => new URL(name, import.meta.url);
const form = document.getElementById("draw");
const field = form.elements;
const progress = form.querySelector("progress");
const canvas = form.querySelector("#draw-canvas");
const said = document.getElementById("draw-said");
const recorded = document.getElementById("draw-recorded");
const tabs = [...form.querySelectorAll("[role=tab]")];
const side = canvas.width;
let settings; // what the checkpoint knows
let model; // its sessions, once they are loaded
let loading = null; // an AbortController, while files are loaded
let wanted = false; // whether something has changed since the last drawing began
let drawing = false;

// ---- Tokens: Qwen's, as chapter 16 has them

// Each byte as a visible character: the vocabularies of GPT-2 and Qwen are written in these.
const SIGNS = (() => {
  const signs = new Map();
  for (let byte = 0, next = 256; byte < 256; byte++) {
    const seen = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    signs.set(byte, String.fromCodePoint(seen ? byte : next++));
  }
  return signs;
})();
const WORDS = /'(?:[sdmt]|ll|re|ve)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+/giu;

// Ids of a caption within the template, and which of them are no padding.
function tokenize(caption) {
  const { vocabulary, special, tokens } = settings;
  const ranks = new Map(settings.merges.map((pair, rank) => [pair.join(" "), rank]));
  const ids = [];
  for (const part of settings.template.replace("{prompt}", () => caption.normalize("NFC")).split(/(<\|?\/?\w+\|?>)/)) {
    if (part in special) ids.push(special[part]);
    else for (const [word] of part.matchAll(WORDS)) ids.push(...pieces(word, ranks).map((piece) => vocabulary[piece]));
  }
  const read = ids.slice(0, tokens);
  return [
    [...read, ...Array(tokens - read.length).fill(settings.padding)],
    Array.from({ length: tokens }, (_, k) => Number(k < read.length)),
  ];
}

// Byte-pair encoding: the pair that was merged first in training is merged, until none is left.
function pieces(word, ranks) {
  const parts = [...new TextEncoder().encode(word)].map((byte) => SIGNS.get(byte));
  for (;;) {
    const rank = (k) => ranks.get(`${parts[k]} ${parts[k + 1]}`) ?? Infinity;
    const best = parts.map((_, k) => k).reduce((a, b) => (rank(b) < rank(a) ? b : a), 0);
    if (rank(best) === Infinity) return parts;
    parts.splice(best, 2, parts[best] + parts[best + 1]);
  }
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

function noise(seed) {
  return Float32Array.from({ length: settings.noise }, (_, k) => {
    const uniform = ((threefry(seed, k) >>> 9) / 2 ** 23) * 2 - 0.99999994;
    return Math.SQRT2 * inverseErf(Math.fround(uniform));
  });
}

// ---- Files

class Failure extends Error {} // its message is for the reader

function hasSimd() {
  const program = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];
  return typeof WebAssembly === "object" && WebAssembly.validate(new Uint8Array(program));
}

const total = () => Object.values(settings.files).reduce((sum, file) => sum + file.bytes, 0);
const address = (name) => here(`${name}?${settings.files[name].digest}`); // of this very content

// The browser's store of what was loaded before; null where there is none, as in private windows of some.
const store = () => (globalThis.caches?.open("draw") ?? Promise.resolve(null)).catch(() => null);

// Which files the store does not have. What belongs to an older model is removed from it.
async function missing() {
  const kept = await store();
  if (!kept) return Object.keys(settings.files);
  const current = new Set(Object.keys(settings.files).map((name) => address(name).href));
  for (const request of await kept.keys()) {
    if (!current.delete(request.url)) await kept.delete(request);
  }
  return Object.keys(settings.files).filter((name) => current.has(address(name).href));
}

async function read(name, signal, count) {
  const kept = await store();
  const before = await kept?.match(address(name));
  const explain = (error) => {
    throw signal.aborted ? error : new Failure(t("{0} could not be loaded: is there a network? Press Draw again.", name));
  };
  const answer = before ?? (await fetch(address(name), { signal }).catch(explain));
  if (!answer.ok) throw new Failure(t("{0} could not be loaded ({1}). Press Draw again later.", name, answer.status));
  const chunks = [];
  for (const reader = answer.body.getReader(); ; ) {
    const { done, value } = await reader.read().catch(explain);
    if (done) break;
    chunks.push(value);
    count(value.length);
  }
  const blob = new Blob(chunks);
  if (!before && blob.size === settings.files[name].bytes) await kept?.put(address(name), new Response(blob)).catch(() => {});
  return new Uint8Array(await blob.arrayBuffer());
}

async function load(signal) {
  if (!hasSimd()) throw new Failure(t("This browser has no WebAssembly with SIMD: a newer one can draw."));
  let loaded = 0;
  progress.hidden = false;
  const files = {};
  for (const name of Object.keys(settings.files)) {
    files[name] = await read(name, signal, (bytes) => {
      loaded += bytes;
      progress.value = loaded / total();
      say(t("Loading {0} of {1} MB …", (loaded / 1e6).toFixed(1), (total() / 1e6).toFixed(1)));
    });
  }
  const runtime = await import(here("ort.wasm.bundle.min.mjs"));
  runtime.env.wasm.numThreads = 1; // more need headers that a plain host of files does not send
  runtime.env.wasm.wasmBinary = files["ort-wasm-simd-threaded.wasm"];
  progress.hidden = true;
  return { runtime, files, sessions: {} };
}

// Runs one of the ONNX files. Each is made ready when it is needed first: who does not edit need not wait for that part.
async function run(name, ...inputs) {
  const externalData = ["drawer", "editor"].includes(name)
    ? [{ path: "transformer.weights", data: model.files["transformer.weights"] }] : [];
  // To optimise these graphs takes longer than it saves. Its warnings are about constants that it would remove.
  const options = { externalData, graphOptimizationLevel: "disabled", logSeverityLevel: 3 };
  model.sessions[name] ??= await model.runtime.InferenceSession.create(model.files[`${name}.onnx`], options);
  const session = model.sessions[name];
  const results = await session.run(Object.fromEntries(session.inputNames.map((input, k) => [input, inputs[k]])));
  return results[session.outputNames[0]];
}

// ---- Drawing: Euler's method from noise to image, as course/flux2/sampler.py has it

async function draw({ caption, seed, steps, scene }) {
  const { Tensor } = model.runtime;
  const numbers = (values, shape) => new Tensor("float32", Float32Array.from(values), shape);
  const [ids, mask] = tokenize(caption);
  const shape = [1, settings.tokens];
  const text = await run(
    "text_encoder", new Tensor("int32", Int32Array.from(ids), shape), new Tensor("bool", Uint8Array.from(mask), shape)
  );
  const reference = scene && (await run("encoder", numbers(scene, [1, side, side, 3])));
  const times = settings.times[steps];
  let x = noise(seed);
  for (let step = 0; step < steps; step++) {
    const tokens = numbers(x, settings.shape);
    // Where the step starts, and where it goes to. Only a flow map has an input for the second.
    const way = [numbers([times[step]], [1]), numbers([times[step + 1]], [1])];
    const { data: velocity } = scene
      ? await run("editor", tokens, reference, text, ...way) : await run("drawer", tokens, text, ...way);
    x = x.map((value, k) => value + (times[step + 1] - times[step]) * velocity[k]);
  }
  return (await run("decoder", numbers(x, settings.shape))).data;
}

function paint(values) {
  const pixels = new ImageData(side, side);
  for (let k = 0; k < values.length / 3; k++) {
    for (let color = 0; color < 3; color++) pixels.data[4 * k + color] = Math.round(255 * values[3 * k + color]);
    pixels.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// ---- The page

function say(text) {
  said.textContent = text;
}

const isEditing = () => tabs[1].getAttribute("aria-selected") === "true";

// The pixels, from 0 to 1, of the scene that is to be edited.
function chosenScene() {
  const picture = form.querySelector("[name=scene]:checked").nextElementSibling;
  const { data } = picture.getContext("2d").getImageData(0, 0, side, side);
  return Float32Array.from(data.filter((_, k) => k % 4 < 3), (value) => value / 255);
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

// Draws what the form says, and again if that has changed meanwhile.
async function redraw() {
  wanted = true;
  if (drawing || !model) return;
  drawing = true;
  form.dataset.state = "drawing";
  try {
    while (wanted) {
      wanted = false;
      const caption = field.caption.value;
      const [seed, steps] = [field.seed, field.steps].map(({ value }) => Number(value));
      const start = performance.now();
      paint(await draw({ caption, seed, steps, scene: isEditing() && chosenScene() }));
      canvas.setAttribute("aria-label", caption);
      const seconds = ((performance.now() - start) / 1000).toFixed(2);
      say(t("Drawn in {0} s, all of it in your browser. What you change is drawn at once.", seconds));
      await new Promise((resume) => setTimeout(resume)); // lets the page show it
    }
  } catch (error) {
    explain(error);
  } finally {
    drawing = false;
    form.dataset.state = "ready";
  }
}

function explain(error) {
  // A browser has different errors for too little memory, and the runtime puts them into text.
  const memory = error instanceof RangeError || /memory|allocat/i.test(error.message);
  const why = memory
    ? t("There is too little memory for the model: close other tabs.") : t("Drawing failed: {0}.", error.message);
  say(t("{0} These images were recorded:", error instanceof Failure ? error.message : why));
  recorded.hidden = false;
}

async function submit() {
  if (loading) return; // a second click does not wait behind the first
  if (!model) {
    loading = new AbortController();
    field.cancel.disabled = false;
    try {
      model = await load(loading.signal);
    } catch (error) {
      if (loading.signal.aborted) say(t("Cancelled."));
      else explain(error);
    } finally {
      progress.hidden = true;
      field.cancel.disabled = true;
      loading = null;
    }
  }
  await redraw();
}

// What Draw draws first is among the recorded images, and stands there from the start.
function showRecorded() {
  const [caption, sheet] = [field.caption.value, new Image()];
  sheet.addEventListener("load", () => {
    if (model || loading) return;
    const column = [...field.steps.options].findIndex(({ value }) => value === field.steps.value);
    canvas.getContext("2d").drawImage(sheet, column * side, 0, side, side, 0, 0, side, side);
    canvas.setAttribute("aria-label", caption);
  });
  sheet.src = here("drawn.webp");
}

// The scenes that can be edited, side by side in one file.
function showScenes() {
  const sheet = new Image();
  sheet.addEventListener("load", () => {
    form.querySelectorAll("[name=scene] + canvas").forEach((picture, k) => {
      picture.getContext("2d", { willReadFrequently: true }).drawImage(sheet, k * side, 0, side, side, 0, 0, side, side);
    });
  });
  sheet.src = here("scenes.webp");
}

function choose(attributes) {
  for (const name of ["size", "color", "shape", "background"]) field[name].value = attributes[name] ?? "";
  compose();
}

// The first of each tab: what is drawn, or what is changed.
const FIRST = [{ size: "large", color: "red", shape: "heart", background: "white" }, { color: "blue" }];

function turnTo(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
  }
  document.getElementById("draw-panel").setAttribute("aria-labelledby", tab.id);
  document.getElementById("draw-scenes").hidden = !isEditing();
  document.getElementById("draw-caption-name").textContent = isEditing() ? t("what changes") : t("caption");
  choose(FIRST[tabs.indexOf(tab)]);
  redraw();
}

async function begin() {
  const answer = await fetch(here("settings.json"));
  if (!answer.ok) return; // the recorded images stay
  settings = await answer.json();
  if (!settings.isWhole) return; // the site was built without the model or its runtime
  for (const name of ["size", "color", "shape", "background"]) {
    for (const word of settings.choices[name === "background" ? "color" : name]) field[name].add(new Option(word));
    field[name].addEventListener("change", compose);
  }
  const seed = () => (field["seed-value"].value = field.seed.value);
  field.seed.addEventListener("input", seed);
  field.caption.addEventListener("input", check);
  field.cancel.addEventListener("click", () => loading?.abort());
  form.addEventListener("input", redraw);
  form.addEventListener("submit", (event) => (event.preventDefault(), submit()));
  for (const [k, tab] of tabs.entries()) {
    tab.addEventListener("click", () => turnTo(tab));
    tab.addEventListener("keydown", ({ key }) => {
      if (!["ArrowLeft", "ArrowRight"].includes(key)) return;
      turnTo(tabs[1 - k]);
      tabs[1 - k].focus();
    });
  }
  seed();
  turnTo(tabs[0]);
  showRecorded();
  showScenes();
  const left = (await missing()).reduce((sum, name) => sum + settings.files[name].bytes, 0);
  say(left ? t("Draw loads {0} MB the first time.", (left / 1e6).toFixed(0)) : t("All that Draw needs is here already."));
  form.hidden = false;
  recorded.hidden = true;
}

begin();
