// Trains beside the page, in a Worker: points to learn come in, or parameters to straighten, and parameters go out.

import { STEPS, createNetwork, learn, straighten } from "./network.mjs";

const EVERY = STEPS / 10; // steps, of which the page hears; of the last one as well

addEventListener("message", ({ data: { points, parameters = createNetwork(0) } }) => {
  const losses = points ? learn(parameters, points, 1) : straighten(parameters, 2);
  let sum = 0;
  let step = 0;
  for (const loss of losses) {
    sum += loss;
    step += 1;
    if (step % EVERY === 0) {
      postMessage({ step, loss: sum / EVERY, parameters });
      sum = 0;
    }
  }
});
