// A source of batches as a `tf.data.Dataset`: the options of `dataset`, its elements, and the callback that
// acknowledges after a training step.

import type { Batch } from "../batch.js";
import { BadOption } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { whole } from "../whole.js";
import type { Column } from "../wire/codec.js";
import { alone, grouped, type Piece, type RowShuffle, shuffled } from "./rows.js";
import type { Items } from "./stages.js";
import { type SourceBatch, StepTracker } from "./stepTracking.js";
import { type Cast, single, stacked, type TensorData } from "./tensors.js";
import type { DatasetOf, Tf, TfLike } from "./tf.js";
import { Iterations, track } from "./trackedDataset.js";

/** Names of tensors of the stream: one, a list for the inputs in order, or an object from the model's names to them. */
export type Names = string | readonly string[] | Readonly<Record<string, string>>;

/** How batches become elements. */
export interface DatasetOptions {
  /** The tensors that are the model's inputs. */
  readonly xs: Names;
  /** The tensors that are its targets. Without them an element is the inputs alone, for `tf.data.zip` or `predict`. */
  readonly ys?: Names;
  /** The samples of an element. Default those of the source's batches. `null` gives single samples, for `batch` of tf.data. */
  readonly batchSize?: number | null;
  /** `float32`, the default, makes every tensor float32. `native` keeps integers as int32 and bool as bool. */
  readonly cast?: Cast;
  /** Draw rows from a window of samples. It goes with `batchSize`. A `Replay` has a `shuffle` of its own, which resumes. */
  readonly shuffle?: RowShuffle;
}

const OPTIONS = {
  xs: true,
  ys: true,
  batchSize: true,
  cast: true,
  shuffle: true,
} satisfies OptionNames<DatasetOptions>;
const OF_SHUFFLE = { window: true, seed: true } satisfies OptionNames<RowShuffle>;

/** What a dataset has besides the verbs of tf.data. */
export interface DatasetControls {
  /** Give it to `fitDataset` in `callbacks`. It acknowledges finished batches, and throws the source's errors. */
  readonly callback: StepCallback;
  /** Return the source's state behind the last finished batch. A source with this state goes on there. */
  state(): unknown;
  /** Throw the error that ended an iteration, if there was one. */
  throwIfFailed(): void;
  /**
   * Acknowledge what the last iteration used, and throw its error instead if it failed. `evaluateDataset` has no callbacks,
   * so call it after that.
   *
   * @returns False if a connection broke before, so that the group hands samples out again.
   */
  acknowledge(): Promise<boolean>;
  /** End all iterations, and close the source. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** A callback of TensorFlow.js. It may stand in a list of objects and in one of callback instances. */
export interface StepCallback {
  onTrainBegin(): Promise<void>;
  onTrainEnd(): Promise<void>;
  onEpochBegin(): Promise<void>;
  onEpochEnd(): Promise<void>;
  onBatchBegin(): Promise<void>;
  /** Note that a step is done. A loop of your own calls it after each step. */
  onBatchEnd(): Promise<void>;
  setParams(): void;
  setModel(): void;
}

/** What yields batches. Some sources have a state, and an end. */
export interface BatchSource extends AsyncIterable<Batch> {
  /** When the source acknowledges a batch without a call. A `Loader` with "next" would do so before the step. */
  readonly acknowledge?: "next" | "manual";
  state?(): unknown;
  close?(): Promise<void>;
}

/**
 * Return batches as a `tf.data.Dataset`. Each iteration of it iterates once over the source.
 *
 * Batches that have `ack()` are acknowledged when `callback` has seen the end of the steps that used their rows.
 *
 * @param source A `Replay`, a `Loader`, or anything that yields batches. The dataset's `close` closes it.
 * @param tf The namespace of `@tensorflow/tfjs`.
 * @example
 * const data = dataset(replay("train", { epoch: 0, batchSize: 32 }), tf, { xs: "x", ys: "y" });
 * await model.fitDataset(data.prefetch(2), { epochs: 4, callbacks: data.callback });
 * await data.close();
 */
export function dataset<T extends TfLike>(
  source: BatchSource,
  tf: T,
  options: DatasetOptions,
): DatasetOf<T> & DatasetControls {
  const known = tf as unknown as Tf;
  const tracker = new StepTracker();
  const iterations = new Iterations();
  const elements = new Elements(source, known, options);
  const close = () => {
    tracker.close();
    return iterations.close(async () => source.close?.());
  };
  const controls: DatasetControls = {
    callback: callbackOf(tracker),
    state: () => elements.require(tracker.state),
    throwIfFailed: () => tracker.throwIfFailed(),
    acknowledge: async () => {
      tracker.throwIfFailed();
      iterations.requireOpen();
      return await tracker.endPass();
    },
    close,
    [Symbol.asyncDispose]: close,
  };
  const found = track(known, tracker, iterations, () => elements.read());
  return Object.assign(found, controls) as DatasetOf<T> & DatasetControls;
}

function callbackOf(tracker: StepTracker): StepCallback {
  const nothing = async () => {};
  return {
    onTrainBegin: nothing,
    onTrainEnd: nothing,
    onEpochBegin: nothing,
    onEpochEnd: async () => tracker.throwIfFailed(),
    onBatchBegin: nothing,
    onBatchEnd: async () => {
      await tracker.endStep();
      tracker.throwIfFailed();
    },
    setParams: () => {},
    setModel: () => {},
  };
}

/** Makes elements of the batches of a source. */
class Elements {
  readonly #source: BatchSource;
  readonly #tf: Tf;
  readonly #options: DatasetOptions;
  readonly #cast: Cast;
  #passes = 0;

  constructor(source: BatchSource, tf: Tf, options: DatasetOptions) {
    checkOptions("dataset", options, OPTIONS, '{ xs: "x", ys: "y" }');
    const { batchSize, cast = "float32", shuffle } = options;
    if (shuffle !== undefined) checkOptions("shuffle of dataset", shuffle, OF_SHUFFLE, "{ window: 1000, seed: 1 }");
    if (cast !== "float32" && cast !== "native") throw new BadOption(`cast is ${cast}, expected "float32" or "native"`);
    for (const [name, value] of Object.entries({ batchSize, window: shuffle?.window })) {
      if (value !== undefined && value !== null) whole(name, value, 1);
    }
    if (source.acknowledge === "next") {
      throw new BadOption('tf.data asks for batches ahead of the step that uses them: give load acknowledge: "manual"');
    }
    if (shuffle !== undefined && batchSize === undefined) throw new BadOption("shuffle goes with batchSize");
    this.#source = source;
    this.#tf = tf;
    this.#options = options;
    this.#cast = cast;
  }

  /** Yield the elements of one iteration over the source. */
  async *read(): Items {
    const { batchSize, shuffle, xs, ys } = this.#options;
    const pass = this.#passes;
    this.#passes += 1;
    const pieces = this.#pieces();
    const rows = shuffle === undefined ? pieces : shuffled(pieces, shuffle, pass);
    const isSample = batchSize === null;
    for await (const group of batchSize === undefined ? alone(rows) : grouped(rows, batchSize ?? 1)) {
      const shares = group.map(({ owner, from, to }) => ({ batch: owner, rows: to - from }));
      const inputs = pick(xs, (name) => this.#tensor(name, group, isSample));
      const value =
        ys === undefined ? inputs : { xs: inputs, ys: pick(ys, (name) => this.#tensor(name, group, isSample)) };
      yield { value, shares };
    }
  }

  /** Return a state of the source, unless the dataset forms batches of its own. */
  require(state: unknown): unknown {
    if (this.#options.batchSize === undefined) return state;
    throw new BadOption("a dataset resumes by the source's batches: give batchSize and shuffle to the source instead");
  }

  async *#pieces(): AsyncGenerator<Piece> {
    const pass: SourceBatch[] = [];
    for await (const batch of this.#source) {
      if (batch.size === 0) continue;
      const owner = { batch, state: this.#source.state?.(), pass, left: batch.size };
      pass.push(owner);
      yield { owner, tensors: this.#chosen(batch), from: 0, to: batch.size };
    }
  }

  /** Return the tensors that the elements use. */
  #chosen({ tensors }: Batch): Record<string, Column> {
    const chosen: Record<string, Column> = Object.create(null);
    const choose = (name: string) => {
      const column = tensors[name];
      if (column === undefined)
        throw new BadOption(`no tensor ${name}, the stream has ${Object.keys(tensors).join(", ")}`);
      chosen[name] = column;
    };
    pick(this.#options.xs, choose);
    pick(this.#options.ys ?? [], choose);
    return chosen;
  }

  /** Return a tensor of these rows. Of `bytes`, and of what is ragged, it is a list with one value a row. */
  #tensor(name: string, group: readonly Piece[], isSample: boolean): unknown {
    const pieces = group.map(({ tensors, from, to }) => ({ column: tensors[name] as Column, from, to }));
    const { spec } = (pieces[0] as (typeof pieces)[number]).column;
    if (!spec.isRagged && !isSample) return this.#made(stacked(pieces, this.#cast));
    const rows = pieces.flatMap(({ column, from, to }) =>
      Array.from({ length: to - from }, (_, at) =>
        spec.dtype === "bytes" ? column.sample(from + at).data : this.#made(single(column, from + at, this.#cast)),
      ),
    );
    return isSample ? rows[0] : rows;
  }

  #made({ values, shape, dtype }: TensorData): unknown {
    return this.#tf.tensor(values, shape, dtype);
  }
}

/** Return one value, a list or an object, as the names are given. */
function pick<V>(names: Names, make: (name: string) => V): V | V[] | Record<string, V> {
  if (typeof names === "string") return make(names);
  if (Array.isArray(names)) return names.map((name: string) => make(name));
  return Object.fromEntries(Object.entries(names).map(([key, name]) => [key, make(name)]));
}
