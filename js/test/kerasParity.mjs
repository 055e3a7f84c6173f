// What a test does with an exported model, in Node and in a page.

/** Return the largest difference between what a model predicts and what Keras predicts. */
export async function predict(tf, model, { inputs, outputs }) {
  const given = tensors(tf, inputs);
  const off = await difference(model.predict(given), outputs);
  tf.dispose(given);
  return off;
}

/** Train on. Return how far the model is from Keras after one step, the losses before and after more, and what stayed. */
export async function train(tf, model, { inputs, wanted, trained, steps }) {
  const given = tensors(tf, inputs);
  const targets = tensors(tf, wanted);
  const read = () => model.trainableWeights.map((weight) => weight.read().dataSync().slice());
  const fit = (optimizer, epochs) => {
    model.compile({ optimizer, loss: "meanSquaredError" });
    return model.fit(given, targets, { epochs, verbose: 0, shuffle: false });
  };
  const before = read();
  await fit(tf.train.sgd(0.1), 1);
  const off = trained === undefined ? 0 : await difference(model.predict(given), trained);
  const [start] = [model.evaluate(given, targets)].flat();
  await fit(tf.train.adam(0.001), steps);
  const [end] = [model.evaluate(given, targets)].flat();
  const losses = [start.dataSync()[0], end.dataSync()[0]];
  const now = read();
  const isSame = (_, index) => now[index].every((value, at) => value === before[index][at]);
  const unchanged = model.trainableWeights.filter(isSame).map(({ originalName }) => originalName);
  tf.dispose([given, targets, start, end]);
  return { off, losses, unchanged, trainable: before.length };
}

function tensors(tf, arrays) {
  return arrays.map(({ values, shape, dtype }) => tf.tensor(values, shape, dtype));
}

/** Return the largest difference between outputs and what they should be. */
async function difference(outputs, expected) {
  const found = [outputs].flat();
  if (found.length !== expected.length) throw new Error(`${found.length} outputs, not ${expected.length}`);
  let largest = 0;
  for (const [index, { values, shape }] of expected.entries()) {
    if (`${found[index].shape}` !== `${shape}`) throw new Error(`a shape of ${found[index].shape}, not ${shape}`);
    const predicted = await found[index].data();
    // Not Math.max alone, which a NaN would pass through to a comparison that is false.
    for (const [at, value] of values.entries()) largest = Math.max(largest, Math.abs(predicted[at] - value));
    found[index].dispose();
  }
  return largest;
}
