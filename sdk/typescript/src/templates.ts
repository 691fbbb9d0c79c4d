/**
 * Templates: named recipes that sessions are made from.
 *
 * @module
 */

import { fill } from "./records.ts";
import type { Dict, Packable } from "./wire.ts";

/** A recipe as its file has it: keys in snake_case, with a `name`. */
export interface Recipe {
  readonly [key: string]: Packable;
  readonly name: string;
}

/** A named recipe that sessions are made from. Fields that it does not set are empty. */
export interface Template {
  readonly name: string;
  /** `file`, `api` or `built-in`. */
  readonly source: string;
  readonly description: string;
  readonly runtime: string;
  /** `host`, `dir:/PATH`, `tar:/PATH` or `image:REFERENCE`; only admins see paths. */
  readonly rootfs: string;
  readonly limits: Readonly<Record<string, number>>;
  readonly env: Readonly<Record<string, string>>;
  readonly labels: Readonly<Record<string, string>>;
  /** Undefined means the gateway's default, an empty list nothing. */
  readonly allowedHosts: readonly string[] | undefined;
  readonly lifetime: number;
  readonly idleTimeout: number;
  /** Languages whose interpreters wait for code, each with the modules that it has loaded. */
  readonly warm: Readonly<Record<string, readonly string[]>>;
  /** `min` and `max` of the sandboxes that are kept ready. */
  readonly pool: Readonly<Record<string, number>>;
  /** Why it cannot be used; then only its name and source are set besides. */
  readonly error: string;
  /** Changes with whatever a ready sandbox is made of. */
  readonly digest: string;
}

const TEMPLATE: Template = {
  name: "",
  source: "",
  description: "",
  runtime: "",
  rootfs: "",
  limits: {},
  env: {},
  labels: {},
  allowedHosts: undefined,
  lifetime: 0,
  idleTimeout: 0,
  warm: {},
  pool: {},
  error: "",
  digest: "",
};

export function template(told: Dict): Template {
  const found = fill(TEMPLATE, told);
  return { ...found, allowedHosts: found.allowedHosts ?? undefined };
}
