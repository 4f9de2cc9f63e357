// A flow in the plane that learns in the page: points that the reader draws, a network that trainer.mjs trains beside the
// page, noise that flows into their shape, and where 1, 2, 4 and 16 steps of Euler's method end.

import { fillNormal, meanDistance, placesAt, times, uniformFrom } from "./flow.mjs";
import { STEPS, flow, pointsOf } from "./network.mjs";
import { textsOf } from "./texts.mjs";

const HIGHEST = 2.6; // the field goes from -2.6 to 2.6
const COMPARED = [1, 2, 4, 16];
const FINE = 64; // steps that are as good as exact
const MOST = 3000; // points that a reader may draw
const FEWEST = 20;
const SECONDS = { flow: 2.5, rest: 1, frame: 0.1 }; // of the moving points; a frame while something is trained

const form = document.querySelector(".flow-plane");
const t = textsOf(form);
const [field, curve, said] = [".flow-field", ".flow-loss", ".flow-said"].map((name) => form.querySelector(name));
const { shape, clear, train, stop, time, play, straighten } = form.elements;
const noise = fillNormal(new Float32Array(600), uniformFrom(7));
const spot = uniformFrom(8); // scatters what the reader draws

let points = pointsOf(shape.value);
let networks = {}; // what was learned, and what was straightened: parameters, and the noise's paths by numbers of steps
let path = null; // of the noise in most steps, by the network that was trained last
let losses = []; // of steps: [step, loss]
let worker = null;
let pen = [0, 0];

// ---- Pictures

// Clears a canvas and lets (0, 0) be its middle and 1 the edge, on a screen of any density.
function begin(canvas) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((size) => Math.round(size * devicePixelRatio));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.setTransform(canvas.width / 2, 0, 0, -canvas.height / 2, canvas.width / 2, canvas.height / 2);
  return context;
}

// The page's own colours, which are others in the dark.
const color = (name) => getComputedStyle(form).getPropertyValue(`--pst-color-${name}`);

function dots(canvas, context, places, name, pixels) {
  const radius = (2 * pixels) / canvas.clientWidth;
  context.fillStyle = color(name);
  context.beginPath();
  for (let k = 0; k < places.length; k += 2) {
    const [x, y] = [places[k] / HIGHEST, places[k + 1] / HIGHEST];
    context.moveTo(x + radius, y);
    context.arc(x, y, radius, 0, 2 * Math.PI);
  }
  context.fill();
}

function paintField() {
  const context = begin(field);
  dots(field, context, points, "text-muted", 1);
  const now = 1 - time.value / 100;
  time.previousElementSibling.textContent = now.toFixed(2);
  time.setAttribute("aria-valuetext", now.toFixed(2));
  if (path) dots(field, context, placesAt(path, times(path.length - 1), now), "secondary", 2);
  if (document.activeElement === field) {
    context.strokeStyle = color("text-base");
    context.lineWidth = 0.01;
    context.strokeRect(pen[0] / HIGHEST - 0.02, pen[1] / HIGHEST - 0.02, 0.04, 0.04);
  }
}

function paintLoss() {
  const context = begin(curve);
  const highest = Math.max(...losses.map(([, loss]) => loss));
  context.strokeStyle = color("secondary");
  context.lineWidth = 0.02;
  context.beginPath();
  for (const [step, loss] of losses) context.lineTo(1.9 * (step / STEPS) - 0.95, 1.9 * (loss / highest) - 0.95);
  context.stroke();
}

function paintEnds() {
  for (const row of form.querySelectorAll(".flow-ends")) {
    const network = networks[row.dataset.network];
    row.hidden = !network;
    if (!network) continue;
    for (const canvas of row.querySelectorAll("canvas")) {
      if (!canvas.clientWidth) continue; // folded away
      const context = begin(canvas);
      dots(canvas, context, points, "text-muted", 0.5);
      dots(canvas, context, network.paths[canvas.dataset.steps].at(-1), "secondary", 1);
    }
  }
}

function paint() {
  paintField();
  paintLoss();
  paintEnds();
}

// ---- Training

// How far one step ends from where many small ones do, on average.
function distance({ parameters }) {
  return meanDistance(flow(parameters, noise, 1).at(-1), flow(parameters, noise, FINE).at(-1), 2).toFixed(2);
}

function say(text) {
  said.textContent = text;
}

function end() {
  worker?.terminate();
  worker = null;
  stop.disabled = true;
}

function start(name, message) {
  end();
  const began = performance.now();
  [stop.disabled, time.disabled, play.disabled] = [false, false, false];
  losses = [];
  worker = new Worker(new URL("trainer.mjs", import.meta.url), { type: "module" });
  worker.addEventListener("error", (event) => {
    event.preventDefault();
    end();
    say(t("Nothing could be trained here: {0}. A newer browser may help.", event.message || "Worker"));
  });
  worker.addEventListener("message", ({ data: { step, loss, parameters } }) => {
    const paths = Object.fromEntries(COMPARED.map((steps) => [steps, flow(parameters, noise, steps)]));
    networks[name] = { parameters, paths };
    path = paths[COMPARED.at(-1)];
    losses.push([step, loss]);
    curve.nextElementSibling.textContent = t("Step {0} of {1}, loss {2}", step, STEPS, loss.toFixed(3));
    straighten.disabled = false;
    if (step === STEPS) {
      end();
      const seconds = ((performance.now() - began) / 1000).toFixed(1);
      const values = [seconds, distance(networks[name]), FINE, distance(networks.learned)];
      say(name === "learned"
        ? t("Trained in {0} s. One step ends {1} from where {2} steps end, on average.", ...values)
        : t("Straightened in {0} s. One step ends {1} from where {2} steps end, on average; before it was {3}.", ...values));
    }
    paint();
  });
  worker.postMessage(message);
  if (!still) run();
}

train.addEventListener("click", () => {
  if (points.length < 2 * FEWEST) return say(t("Draw {0} points at least, or choose a shape.", FEWEST));
  networks = { learned: networks.learned }; // which is shown until the new one is there
  say(t("Training begins …"));
  start("learned", { points });
});
straighten.addEventListener("click", () => {
  say(t("Each noise is followed to the end of its path …"));
  start("straightened", { parameters: networks.learned.parameters });
});
stop.addEventListener("click", () => {
  end();
  say(t("Stopped. What was learned so far is shown."));
});

// ---- Drawing

function choose(kind, chosen) {
  if (shape.value !== kind) shape.value = kind;
  points = chosen;
  paint();
}

function put(x, y) {
  const near = (value) => value + 0.12 * (spot() - 0.5);
  const added = [0, 1].flatMap(() => [near(x), near(y)]);
  choose("own", Float32Array.from([...(shape.value === "own" ? points : []), ...added].slice(-2 * MOST)));
}

function placeOf(event) {
  const box = field.getBoundingClientRect();
  const part = [(event.clientX - box.left) / box.width, 1 - (event.clientY - box.top) / box.height];
  return part.map((value) => (2 * value - 1) * HIGHEST);
}

let last = null; // where the pointer was
field.addEventListener("pointerdown", (event) => {
  field.setPointerCapture(event.pointerId);
  pen = last = placeOf(event);
  put(...last);
});
field.addEventListener("pointermove", (event) => {
  if (!last) return;
  const next = placeOf(event);
  const parts = Math.floor(Math.hypot(next[0] - last[0], next[1] - last[1]) / 0.06);
  for (let k = 1; k <= parts; k++) put(...last.map((value, d) => value + (k / parts) * (next[d] - value)));
  if (parts) last = next;
});
for (const name of ["pointerup", "pointercancel"]) field.addEventListener(name, () => (last = null));
field.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1], " ": [0, 0] };
  if (!moves[event.key]) return;
  event.preventDefault();
  pen = pen.map((value, d) => Math.max(-HIGHEST, Math.min(HIGHEST, value + moves[event.key][d])));
  if (event.key === " ") put(...pen);
  else paintField();
});
for (const name of ["focus", "blur"]) field.addEventListener(name, paintField);
shape.addEventListener("change", () => choose(shape.value, shape.value === "own" ? new Float32Array(0) : pointsOf(shape.value)));
clear.addEventListener("click", () => choose("own", new Float32Array(0)));

// ---- Moving points: from noise to data, again and again, until the reader stops them or looks elsewhere

const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
let running = null; // when the points began to move, 0 for now
let seen = true;
let frame;
let painted = 0; // when the last frame was

function move(clock) {
  running ||= clock;
  if (worker && clock - painted < 1000 * SECONDS.frame) return next(); // what trains needs the processor more
  painted = clock;
  const passed = ((clock - running) / 1000) % (SECONDS.flow + SECONDS.rest);
  time.value = Math.min(100, (100 * passed) / SECONDS.flow);
  paintField();
  next();
}

function next() {
  cancelAnimationFrame(frame);
  if (seen && running !== null) frame = requestAnimationFrame(move);
}

function run() {
  running ??= 0;
  play.textContent = t("Pause");
  next();
}

function rest() {
  cancelAnimationFrame(frame);
  [running, play.textContent] = [null, t("Play")];
}

play.addEventListener("click", () => (running === null ? run() : rest()));
time.addEventListener("input", () => {
  rest();
  paintField();
});
play.hidden = still;

// ---- The page

for (const row of form.querySelectorAll(".flow-ends")) {
  for (const steps of COMPARED) {
    const [figure, canvas, caption] = ["figure", "canvas", "figcaption"].map((name) => document.createElement(name));
    caption.textContent = steps === 1 ? t("1 step") : t("{0} steps", steps);
    canvas.dataset.steps = steps;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", t("Where noise ends, steps: {0}", steps));
    figure.append(canvas, caption);
    row.append(figure);
  }
}
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = false;
form.previousElementSibling.hidden = true; // the still picture, which print shows
say(t("Training takes some seconds. {0} steps, all of it in your browser.", STEPS));
new ResizeObserver(paint).observe(field);
new MutationObserver(paint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
form.querySelector("details").addEventListener("toggle", paint);
new IntersectionObserver(([entry]) => {
  seen = entry.isIntersecting;
  next();
}).observe(form);
