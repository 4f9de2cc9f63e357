// A flow in one dimension, exact, with sliders for the time, the number of Euler's steps and the shift of their times.
// In chapter 17 one chooses, too, how noise and data are paired.

import {
  density, fillNormal, follow, meanDistance, meanVelocity, placesAt, straightVelocity, times, uniformFrom,
} from "./flow.mjs";
import { textsOf } from "./texts.mjs";

const STEPS = [1, 2, 3, 4, 6, 8, 16, 32];
const SHIFTS = [0.25, 0.5, 1, 2, 4, 8];
const HIGHEST = 3; // x goes from -3 to 3
const DENSEST = 1.5; // and the histogram to this density
const BINS = 48;
const SECONDS = 4; // from noise to data

const form = document.querySelector(".flow-line");
const t = textsOf(form);
const [picture, said] = [form.querySelector("svg"), form.querySelector(".flow-said")];
const { time, steps, shift, pairs, play } = form.elements;

// A thousand starts, as evenly spread as 20,000 random ones are when they are sorted.
const noise = fillNormal(new Float64Array(20_000), uniformFrom(0)).sort().filter((_, k) => k % 20 === 10);
const shown = (x) => x.filter((_, k) => k % 50 === 25);
const fine = times(200);
// What a model would learn from each kind of pairs, and where that leads.
const velocities = { chance: (x, now) => x.map((value) => meanVelocity(value, now)) };
const exacts = { chance: follow(velocities.chance, noise, fine) };
velocities.path = straightVelocity(noise, exacts.chance.at(-1));
exacts.path = follow(velocities.path, noise, fine);
const kind = () => pairs?.value ?? "chance";

let at; // the times of Euler's steps
let path; // where they lead

function step() {
  const count = STEPS[steps.value];
  at = times(count, SHIFTS[shift.value]);
  path = follow(velocities[kind()], noise, at);
  const off = meanDistance(path.at(-1), exacts[kind()].at(-1), 1).toFixed(2);
  said.textContent = count === 1
    ? t("One step ends {0} from the exact ends, on average.", off)
    : t("{0} steps end {1} from the exact ends, on average.", count, off);
  show();
}

function show() {
  const timeNow = 1 - time.value / 100;
  const values = [timeNow.toFixed(2), STEPS[steps.value], SHIFTS[shift.value]];
  for (const [k, slider] of [time, steps, shift].entries()) {
    slider.previousElementSibling.textContent = values[k];
    slider.setAttribute("aria-valuetext", values[k]);
  }
  const label = t("Paths from noise to data. Points at t = {0}, Euler steps: {1}, shift: {2}.", ...values);
  picture.setAttribute("aria-label", label);
  paint(placesAt(path, at, timeNow), timeNow);
}

function paint(now, timeNow) {
  const [width, height, side, bottom] = [picture.getBoundingClientRect().width, 300, 70, 24];
  const across = (value) => (1 - value) * (width - side - 20) + 10;
  const up = (x) => (1 - x / HIGHEST) * ((height - bottom) / 2);
  const aside = (dense) => width - side + (Math.min(dense, DENSEST) / DENSEST) * (side - 4);
  const line = (points, kind) => `<polyline class="${kind}" points="${points.map((p) => p.map((v) => v.toFixed(1))).join(" ")}"/>`;
  const parts = at.map((value) => line([[across(value), 0], [across(value), height - bottom]], "flow-time"));
  const curve = exacts[kind()].filter((_, k) => k % 4 === 0).map(shown);
  curve[0].forEach((_, n) => parts.push(line(curve.map((x, k) => [across(1 - k / 50), up(x[n])]), "flow-exact")));
  const pieces = path.map(shown);
  pieces[0].forEach((_, n) => parts.push(line(pieces.map((x, k) => [across(at[k]), up(x[n])]), "flow-euler")));
  for (const x of shown(now)) {
    parts.push(`<circle class="flow-point" r="3.5" cx="${across(timeNow).toFixed(1)}" cy="${up(x).toFixed(1)}"/>`);
  }
  const size = (2 * HIGHEST) / BINS;
  const histogram = (x) => {
    const counts = Array(BINS).fill(0);
    for (const value of x) {
      const bin = Math.floor((value + HIGHEST) / size);
      if (bin in counts) counts[bin] += 1;
    }
    return counts.flatMap((count, k) => {
      const dense = aside(count / x.length / size);
      return [[dense, up(-HIGHEST + k * size)], [dense, up(-HIGHEST + (k + 1) * size)]];
    });
  };
  const grid = Array.from({ length: 121 }, (_, k) => -HIGHEST + k / 20);
  const filled = kind() === "chance"
    ? grid.map((x) => [aside(density(x, timeNow)), up(x)]) : histogram(placesAt(exacts.path, fine, timeNow));
  parts.push(line([[aside(0), up(-HIGHEST)], ...filled], "flow-filled"));
  parts.push(line(histogram(now), "flow-outline"));
  const label = (x, anchor, text) => `<text x="${x}" y="${height - 6}" text-anchor="${anchor}">${text}</text>`;
  parts.push(label(10, "start", t("t = 1: noise")), label(width - side - 10, "end", t("t = 0: data")));
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.innerHTML = parts.join("");
}

// ---- The page

let playing = null; // when the points began to move, 0 for now
let frame;

function move(clock) {
  playing ||= clock - (time.value / 100) * 1000 * SECONDS;
  time.value = Math.min(100, (clock - playing) / 10 / SECONDS);
  show();
  if (Number(time.value) === 100) stop();
  else frame = requestAnimationFrame(move);
}

function stop() {
  cancelAnimationFrame(frame);
  playing = null;
  play.textContent = t("Play");
}

play.addEventListener("click", () => {
  if (playing !== null) return stop();
  if (Number(time.value) === 100) time.value = 0;
  [playing, play.textContent] = [0, t("Pause")];
  frame = requestAnimationFrame(move);
});
[steps.max, shift.max] = [STEPS.length - 1, SHIFTS.length - 1];
for (const choice of [steps, shift, pairs]) choice?.addEventListener("input", step);
time.addEventListener("input", () => {
  stop();
  show();
});
form.addEventListener("submit", (event) => event.preventDefault());
play.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;
form.hidden = false;
form.previousElementSibling.hidden = true; // the still picture, which print shows
step();
new ResizeObserver(show).observe(picture);
