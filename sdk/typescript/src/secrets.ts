/**
 * Secrets of users, which sessions get as variables. No call returns a value.
 *
 * @module
 */

import type { CallOptions } from "./connections.ts";
import { fill } from "./records.ts";
import type { Dict } from "./wire.ts";

/** A stored secret, without its value. */
export interface SecretInfo {
  readonly name: string;
  /** A secret has one value, with the key `value`, or several. */
  readonly key: string;
  /** Sessions of this tenant can get it. */
  readonly tenantId: string;
  /** Seconds since 1970. */
  readonly createdAt: number;
  readonly updatedAt: number;
}

/** A value of a secret. */
export interface SecretOptions extends CallOptions {
  /** For a secret with several values; without it, `value`. */
  key?: string | undefined;
  /** Whose sessions can get it; the client's own tenant by default. */
  tenantId?: string | undefined;
}

const SECRET: SecretInfo = { name: "", key: "", tenantId: "", createdAt: 0, updatedAt: 0 };

export function secret(told: Dict): SecretInfo {
  return fill(SECRET, told);
}
