/**
 * Images: root file systems from registries.
 *
 * @module
 */

import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

/** An image that the gateway's host has. */
export interface Image {
  /** Its reference as a whole, or `tar:` and the path of an archive. */
  readonly name: string;
  /** Of its manifest. */
  readonly digest: string;
  /** Digests, the lowest layer first. Layers are shared among images. */
  readonly layers: readonly string[];
  /** Of all its files, in bytes. */
  readonly size: number;
  /** Seconds since 1970. */
  readonly pulledAt: number;
  readonly platform: string;
  readonly workdir: string;
}

const IMAGE: Image = { name: "", digest: "", layers: [], size: 0, pulledAt: 0, platform: "", workdir: "" };

export function image(told: Dict): Image {
  return fill(IMAGE, told);
}
