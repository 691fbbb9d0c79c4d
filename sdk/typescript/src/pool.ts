/**
 * The warm pool: sandboxes that are ready before they are asked for.
 *
 * @module
 */

import type { CallOptions } from "./connections.ts";
import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

/** The ready sandboxes of one template on one runtime. */
export interface PoolInfo {
  readonly template: string;
  readonly runtime: string;
  readonly ready: number;
  readonly starting: number;
  /** How many are wanted now. */
  readonly target: number;
  readonly min: number;
  readonly max: number;
  /** How many sessions got a ready one, and how many did not. */
  readonly hits: number;
  readonly misses: number;
  /** Why the last one could not be made. */
  readonly failure: string;
  /** The parts of the template that a ready one lacks, in words. */
  readonly leftOut: readonly string[];
}

const POOL: PoolInfo = {
  template: "",
  runtime: "",
  ready: 0,
  starting: 0,
  target: 0,
  min: 0,
  max: 0,
  hits: 0,
  misses: 0,
  failure: "",
  leftOut: [],
};

/** How many sandboxes should be ready. */
export interface SetPoolOptions extends CallOptions {
  /** Of which template; the default one if empty. */
  template?: string | undefined;
  /** On which runtime; the gateway's choice if empty. */
  runtime?: string | undefined;
  minReady?: number | undefined;
  maxReady?: number | undefined;
  /** Return when `minReady` of them are ready. */
  wait?: boolean | undefined;
}

export function poolInfo(told: Dict): PoolInfo {
  return fill(POOL, told);
}
