// What both widgets of chapter 15 know of a flow: random numbers, the times of the steps, Euler's method, and the exact
// mean velocity in one dimension. The names are those of the chapter.

// Uniform random numbers below 1 from a seed (Mulberry32), so that a seed gives the same picture everywhere.
export function uniformFrom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// Fills an array with normal random numbers (Box and Muller).
export function fillNormal(array, uniform) {
  for (let k = 0; k < array.length; k += 2) {
    const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
    const angle = 2 * Math.PI * uniform();
    array[k] = radius * Math.cos(angle);
    if (k + 1 < array.length) array[k + 1] = radius * Math.sin(angle);
  }
  return array;
}

// The times of all steps and the end, from 1 to 0, as flux2.times has them.
export function times(steps, shift = 1) {
  return Array.from({ length: steps + 1 }, (_, k) => {
    const even = 1 - k / steps;
    return (shift * even) / (1 + (shift - 1) * even);
  });
}

// Euler's method: all places on the way, one array for each of the times. `velocity` takes places and a time.
export function follow(velocity, noise, at) {
  const path = [noise];
  for (let k = 1; k < at.length; k++) {
    const x = path[k - 1];
    const speed = velocity(x, at[k - 1]);
    path.push(x.map((value, n) => value + (at[k] - at[k - 1]) * speed[n]));
  }
  return path;
}

// Where the points of such a path are at any time: between two of the times they move along a straight line.
export function placesAt(path, at, t) {
  let k = 1;
  while (k < at.length - 1 && at[k] > t) k++;
  const part = (t - at[k - 1]) / (at[k] - at[k - 1]);
  return path[k].map((end, n) => (1 - part) * path[k - 1][n] + part * end);
}

// How far two lists of places in so many dimensions are from each other, on average.
export function meanDistance(one, other, dimensions) {
  let sum = 0;
  for (let k = 0; k < one.length; k += dimensions) {
    let square = 0;
    for (let d = k; d < k + dimensions; d++) square += (one[d] - other[d]) ** 2;
    sum += Math.sqrt(square);
  }
  return (sum * dimensions) / one.length;
}

// ---- In one dimension, where most data is near 1 and some near -1.5

const PEAKS = [-1.5, 1.0];
const SHARES = [0.3, 0.7];
const WIDTH = 0.2; // the standard deviation of each peak

// For each peak, how much of what passes x at the time t belongs to it: its share times its normal density.
function densities(x, t) {
  const variance = (1 - t) ** 2 * WIDTH ** 2 + t ** 2;
  const factor = 1 / Math.sqrt(2 * Math.PI * variance);
  return PEAKS.map((peak, k) => SHARES[k] * factor * Math.exp(-((x - (1 - t) * peak) ** 2) / (2 * variance)));
}

export function density(x, t) {
  return densities(x, t).reduce((a, b) => a + b);
}

export function meanVelocity(x, t) {
  const variance = (1 - t) ** 2 * WIDTH ** 2 + t ** 2;
  const slope = (t - (1 - t) * WIDTH ** 2) / variance;
  // Far away both densities are 0 in a computer's numbers. So take their exponents relative to the larger one.
  const away = PEAKS.map((peak) => x - (1 - t) * peak);
  const exponents = away.map((distance, k) => Math.log(SHARES[k]) - distance ** 2 / (2 * variance));
  const largest = Math.max(...exponents);
  const likely = exponents.map((exponent) => Math.exp(exponent - largest));
  const sum = likely.reduce((a, b) => a + b);
  return PEAKS.reduce((mean, peak, k) => mean + (likely[k] / sum) * (slope * away[k] - peak), 0);
}

// The velocity once the paths are straightened: noise and the ends of its own paths, both sorted, joined by lines.
export function straightVelocity(noise, ends) {
  const speeds = noise.map((start, k) => start - ends[k]);
  return (x, t) => {
    const places = noise.map((start, k) => (1 - t) * ends[k] + t * start); // they rise: the lines do not cross
    return x.map((value) => interpolate(value, places, speeds));
  };
}

// The value at x of a function that is known at places that rise, and is constant outside of them.
function interpolate(x, places, values) {
  let [low, high] = [0, places.length - 1];
  if (x <= places[low]) return values[low];
  if (x >= places[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] <= x) low = middle;
    else high = middle;
  }
  return values[low] + ((x - places[low]) / (places[high] - places[low])) * (values[high] - values[low]);
}
