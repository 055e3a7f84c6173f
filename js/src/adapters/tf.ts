// The types of the namespace `tf` of @tensorflow/tfjs, as far as the package needs it. The user gives it, and nothing
// of it is imported.

import type { TensorData } from "./tensors.js";

/** The namespace `tf` of `@tensorflow/tfjs`, as a caller's types have it. */
export interface TfLike {
  readonly Tensor: abstract new (...args: never[]) => object;
  tensor(values: TensorData["values"], shape: number[], dtype: TensorData["dtype"]): unknown;
  tidy(run: () => never): unknown;
  readonly data: {
    readonly Dataset: (abstract new () => object) & { readonly prototype: object };
    generator(make: () => never): unknown;
  };
}

/** The `tf.data.Dataset` of a namespace. Its elements are `any`, because the stream decides what they are. */
export type DatasetOf<T extends TfLike> = T["data"]["Dataset"]["prototype"];

/** The same as it is at run time. The generic types of TensorFlow.js do not fit an interface. */
export interface Tf {
  readonly Tensor: new () => object;
  tensor(values: TensorData["values"], shape: number[], dtype: TensorData["dtype"]): unknown;
  tidy(run: () => unknown): unknown;
  readonly data: {
    readonly Dataset: new () => object;
    generator(make: () => Promise<TfIterator>): TfDataset;
  };
}

/** An iterator of tf.data. It never learns that it is no longer needed. */
export interface TfIterator {
  next(): Promise<IteratorResult<unknown, unknown>>;
}

export interface TfDataset {
  iterator(): Promise<TfIterator>;
  batch(size: number): TfDataset;
  shuffle(size: number, seed?: string, reshuffleEachIteration?: boolean): TfDataset;
}
