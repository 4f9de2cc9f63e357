// A network that learns the mean velocity of a flow in the plane: a multilayer perceptron with its gradients and Adam, by
// hand, on arrays of numbers. The loss is chapter 15's. It runs in a Worker of the page and in Node.js.

import { fillNormal, follow, times, uniformFrom } from "./flow.mjs";

const FREQUENCIES = [1, 2, 4, 8];
const FEATURES = 3 * (1 + 2 * FREQUENCIES.length); // of x, y and t
const WIDTHS = [FEATURES, 64, 64, 2];
const BATCH = 256;
export const STEPS = 500;
const OWN_PAIRS = 4096;
const JITTER = 0.03; // points become small spots, as no network learns a density of points

// All parameters lie in one array, of which each layer's weights and biases are parts, and gradients in another.
function layersOf(numbers) {
  const layers = [];
  let start = 0;
  for (let k = 1; k < WIDTHS.length; k++) {
    const [inputs, outputs] = [WIDTHS[k - 1], WIDTHS[k]];
    const weight = numbers.subarray(start, (start += inputs * outputs)); // (outputs, inputs)
    const bias = numbers.subarray(start, (start += outputs));
    layers.push({ inputs, outputs, weight, bias });
  }
  return layers;
}

export function createNetwork(seed) {
  const count = WIDTHS.slice(1).reduce((sum, width, k) => sum + (WIDTHS[k] + 1) * width, 0);
  const parameters = new Float32Array(count);
  const uniform = uniformFrom(seed);
  for (const { inputs, weight } of layersOf(parameters)) {
    fillNormal(weight, uniform);
    for (let k = 0; k < weight.length; k++) weight[k] *= inputs ** -0.5;
  }
  return parameters;
}

// Each coordinate and the time, and sines and cosines of them, with which a small network learns finer detail.
function featuresOf(x, t) {
  const found = new Float32Array((x.length / 2) * FEATURES);
  let k = 0;
  for (let row = 0; row < x.length / 2; row++) {
    for (const value of [x[2 * row], x[2 * row + 1], t[row]]) {
      found[k++] = value;
      for (const frequency of FREQUENCIES) {
        found[k++] = Math.sin(frequency * value);
        found[k++] = Math.cos(frequency * value);
      }
    }
  }
  return found;
}

// The products of each row of a with each row of b, rows of the same length: the matrix a times b transposed. Four rows and
// two columns at a time, so that each number that is read is used several times; what is left over is computed twice.
function product(a, b, length) {
  const rows = a.length / length;
  const columns = b.length / length;
  const found = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row += 4) {
    const row1 = Math.min(row + 1, rows - 1);
    const row2 = Math.min(row + 2, rows - 1);
    const row3 = Math.min(row + 3, rows - 1);
    const a0 = row * length;
    const a1 = row1 * length;
    const a2 = row2 * length;
    const a3 = row3 * length;
    for (let column = 0; column < columns; column += 2) {
      const column1 = Math.min(column + 1, columns - 1);
      const b0 = column * length;
      const b1 = column1 * length;
      let s00 = 0, s10 = 0, s20 = 0, s30 = 0;
      let s01 = 0, s11 = 0, s21 = 0, s31 = 0;
      for (let k = 0; k < length; k++) {
        const y0 = b[b0 + k];
        const y1 = b[b1 + k];
        const x0 = a[a0 + k];
        const x1 = a[a1 + k];
        const x2 = a[a2 + k];
        const x3 = a[a3 + k];
        s00 += x0 * y0;
        s01 += x0 * y1;
        s10 += x1 * y0;
        s11 += x1 * y1;
        s20 += x2 * y0;
        s21 += x2 * y1;
        s30 += x3 * y0;
        s31 += x3 * y1;
      }
      found[row * columns + column] = s00;
      found[row1 * columns + column] = s10;
      found[row2 * columns + column] = s20;
      found[row3 * columns + column] = s30;
      found[row * columns + column1] = s01;
      found[row1 * columns + column1] = s11;
      found[row2 * columns + column1] = s21;
      found[row3 * columns + column1] = s31;
    }
  }
  return found;
}

// A matrix whose rows have this length, with rows and columns exchanged.
function transpose(matrix, length) {
  const rows = matrix.length / length;
  const found = new Float32Array(matrix.length);
  for (let row = 0; row < rows; row++) {
    for (let k = 0; k < length; k++) found[k * rows + row] = matrix[row * length + k];
  }
  return found;
}

// What goes into each layer and, last, what comes out. Between the layers is silu, which is x times its sigmoid; the
// sigmoids are kept for its derivative.
function forward(layers, input) {
  const inputs = [input];
  const sigmoids = [];
  for (const layer of layers) {
    const output = product(inputs.at(-1), layer.weight, layer.inputs);
    for (let start = 0; start < output.length; start += layer.outputs) {
      for (let j = 0; j < layer.outputs; j++) output[start + j] += layer.bias[j];
    }
    if (layer !== layers.at(-1)) {
      const sigmoid = new Float32Array(output.length);
      for (let k = 0; k < output.length; k++) {
        sigmoid[k] = 1 / (1 + Math.exp(-output[k]));
        output[k] *= sigmoid[k];
      }
      sigmoids.push(sigmoid);
    }
    inputs.push(output);
  }
  return { inputs, sigmoids };
}

// The velocity at places x, (x, y) after (x, y), and times t: a number, or one for each place.
export function velocity(parameters, x, t) {
  const each = typeof t === "number" ? new Float32Array(x.length / 2).fill(t) : t;
  return forward(layersOf(parameters), featuresOf(x, each)).inputs.at(-1);
}

// The mean squared distance of the velocity from what it should be. Its gradients go into an array.
export function lossAndGradients(parameters, x, t, target, gradients) {
  const layers = layersOf(parameters);
  const ofLayers = layersOf(gradients);
  const { inputs, sigmoids } = forward(layers, featuresOf(x, t));
  const found = inputs.at(-1);
  let loss = 0;
  let ofOutput = new Float32Array(found.length);
  for (let k = 0; k < found.length; k++) {
    loss += (found[k] - target[k]) ** 2 / found.length;
    ofOutput[k] = (2 * (found[k] - target[k])) / found.length;
  }
  for (let n = layers.length - 1; n >= 0; n--) {
    const { inputs: width, outputs, weight } = layers[n];
    const { weight: ofWeight, bias: ofBias } = ofLayers[n];
    ofWeight.set(product(transpose(ofOutput, outputs), transpose(inputs[n], width), ofOutput.length / outputs));
    ofBias.fill(0);
    for (let start = 0; start < ofOutput.length; start += outputs) {
      for (let j = 0; j < outputs; j++) ofBias[j] += ofOutput[start + j];
    }
    if (n === 0) break;
    const ofInput = product(ofOutput, transpose(weight, width), outputs);
    const sigmoid = sigmoids[n - 1];
    for (let k = 0; k < ofInput.length; k++) {
      ofInput[k] *= sigmoid[k] + inputs[n][k] * (1 - sigmoid[k]); // silu's derivative, by its own value
    }
    ofOutput = ofInput;
  }
  return loss;
}

// Trains parameters in place, by Adam with a learning rate that falls to 0 along a cosine. `choosePair` puts a noise and
// its data into two arrays at a place. Gives the loss after each step.
function* train(parameters, choosePair, uniform, steps) {
  const [gradients, mean, square] = [0, 0, 0].map(() => new Float32Array(parameters.length));
  const [noise, data, x, target] = [0, 0, 0, 0].map(() => new Float32Array(2 * BATCH));
  const t = new Float32Array(BATCH);
  for (let step = 1; step <= steps; step++) {
    fillNormal(noise, uniform);
    for (let n = 0; n < BATCH; n++) {
      t[n] = uniform();
      choosePair(noise, data, 2 * n);
    }
    for (let k = 0; k < x.length; k++) {
      x[k] = (1 - t[k >> 1]) * data[k] + t[k >> 1] * noise[k];
      target[k] = noise[k] - data[k];
    }
    const loss = lossAndGradients(parameters, x, t, target, gradients);
    const rate = 5e-3 * (1 + Math.cos((Math.PI * step) / steps));
    for (let k = 0; k < parameters.length; k++) {
      mean[k] += 0.1 * (gradients[k] - mean[k]);
      square[k] += 0.001 * (gradients[k] ** 2 - square[k]);
      const change = mean[k] / (1 - 0.9 ** step) / (Math.sqrt(square[k] / (1 - 0.999 ** step)) + 1e-8);
      parameters[k] -= rate * change;
    }
    yield loss;
  }
}

// Flow matching: each noise is paired with a point by chance. Gives the loss after each step.
export function learn(parameters, points, seed, steps = STEPS) {
  const uniform = uniformFrom(seed);
  const spot = new Float32Array(2);
  const choosePair = (noise, data, place) => {
    const point = 2 * Math.floor((uniform() * points.length) / 2);
    fillNormal(spot, uniform);
    for (const k of [0, 1]) data[place + k] = points[point + k] + JITTER * spot[k];
  };
  return train(parameters, choosePair, uniform, steps);
}

// Reflow: each noise is paired with the end of its own path. Gives the loss after each step.
export function straighten(parameters, seed, steps = STEPS) {
  const uniform = uniformFrom(seed);
  const starts = fillNormal(new Float32Array(2 * OWN_PAIRS), uniform);
  const ends = flow(parameters, starts, 32).at(-1);
  const choosePair = (noise, data, place) => {
    const pair = 2 * Math.floor(uniform() * OWN_PAIRS);
    for (const k of [0, 1]) [noise[place + k], data[place + k]] = [starts[pair + k], ends[pair + k]];
  };
  return train(parameters, choosePair, uniform, steps);
}

// Places on the way from noise to t = 0 in so many steps of Euler's method.
export function flow(parameters, noise, steps) {
  return follow((x, t) => velocity(parameters, x, t), noise, times(steps));
}

// ---- Points to learn

const SHAPES = {
  ring: (u) => [1.5 * Math.cos(2 * Math.PI * u), 1.5 * Math.sin(2 * Math.PI * u)],
  moons: (u) => {
    const angle = 2 * Math.PI * u;
    return u < 0.5
      ? [1.2 * Math.cos(angle) - 0.6, 1.2 * Math.sin(angle) - 0.3]
      : [1.2 * Math.cos(angle) + 0.6, 1.2 * Math.sin(angle) + 0.3];
  },
  spiral: (u) => {
    const turn = Math.sqrt(u); // so that the points lie as close everywhere
    return [1.9 * turn * Math.cos(4 * Math.PI * turn), 1.9 * turn * Math.sin(4 * Math.PI * turn)];
  },
  heart: (u) => {
    const angle = 2 * Math.PI * u;
    const up = 13 * Math.cos(angle) - 5 * Math.cos(2 * angle) - 2 * Math.cos(3 * angle) - Math.cos(4 * angle);
    return [0.1 * 16 * Math.sin(angle) ** 3, 0.1 * (up + 2)];
  },
};

// Points along a shape, (x, y) after (x, y).
export function pointsOf(shape, count = 400) {
  return Float32Array.from(Array.from({ length: count }, (_, k) => SHAPES[shape]((k + 0.5) / count)).flat());
}
