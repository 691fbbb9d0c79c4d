/**
 * Sessions: their options and their descriptions.
 *
 * @module
 */

import type { CallOptions } from "./connections.ts";
import { GuestFailed, InvalidRequest } from "./errors.ts";
import { CALL_NAMES, checkOptions, type Names } from "./options.ts";
import { fill, isDict } from "./records.ts";
import type { Dict, Packable } from "./wire.ts";

/** The most that a session may use. Sizes are bytes, or text like `"512M"` and `"2G"`. */
export interface Limits {
  cpus?: number | undefined;
  memory?: number | string | undefined;
  pids?: number | undefined;
  disk?: number | string | undefined;
  inodes?: number | string | undefined;
  openFiles?: number | undefined;
  output?: number | string | undefined;
}

/** An entry for /workspace of a new session, such as `{ file: { path: "a.txt", content: "hello" } }`. */
export type ManifestEntry = Readonly<Record<string, Readonly<Record<string, Packable>>>>;

/** Options of a new session. */
export interface SessionOptions extends CallOptions {
  /** `gvisor` or `container`; by default the best one that works. */
  runtimeClass?: string | undefined;
  /**
   * The words of its egress policy: host names, `*.wildcards` and networks, with or without `:port`, and
   * `default`, `open`, `none`, `strict`. Undefined means the gateway's default, an empty list nothing.
   */
  allowedHosts?: readonly string[] | undefined;
  tenantId?: string | undefined;
  /** Variables of all its programs. */
  env?: Readonly<Record<string, string>> | undefined;
  labels?: Readonly<Record<string, string>> | undefined;
  limits?: Limits | undefined;
  /** Seconds until it is destroyed whatever happens. */
  lifetime?: number | undefined;
  /** Seconds without activity after which it is destroyed. */
  idleTimeout?: number | undefined;
  /** An id of your choice. */
  sessionId?: string | undefined;
  /** Two creations with the same request id are one. */
  requestId?: string | undefined;
  /** The name of a snapshot that /workspace begins with. */
  snapshot?: string | undefined;
  /** Content for /workspace. */
  manifest?: readonly ManifestEntry[] | undefined;
  /** What it is made from; the other options here win over the template's. */
  template?: string | undefined;
  /** Variables that are secrets, such as `{ TOKEN: "github" }` or `{ TOKEN: "github:key" }`. */
  secrets?: Readonly<Record<string, string>> | undefined;
}

const LIMIT_NAMES: Names<Limits> = { cpus: true, memory: true, pids: true, disk: true, inodes: true, openFiles: true, output: true };
const SESSION_NAMES: Names<SessionOptions & { progress: unknown }> = {
  ...CALL_NAMES,
  allowedHosts: true,
  env: true,
  idleTimeout: true,
  labels: true,
  lifetime: true,
  limits: true,
  manifest: true,
  progress: true, // of a snapshot that is restored
  requestId: true,
  runtimeClass: true,
  secrets: true,
  sessionId: true,
  snapshot: true,
  template: true,
  tenantId: true,
};

/** A session as its owner sees it. */
export interface SessionInfo {
  readonly sessionId: string;
  readonly tenantId: string;
  readonly runtime: string;
  readonly phase: "creating" | "active" | "paused" | "ended";
  /** Seconds since 1970. */
  readonly createdAt: number;
  /** Seconds since 1970; 0 means never. */
  readonly expiresAt: number;
  readonly idleTimeout: number;
  readonly labels: Readonly<Record<string, string>>;
  readonly envKeys: readonly string[];
  readonly limits: Readonly<Record<string, number>>;
  readonly endedReason: string;
  /** What it may reach, in the words that were asked for. */
  readonly allowedHosts: readonly string[];
  /** The session whose sub-agent it is; empty for most. */
  readonly parentId: string;
  /** How many background programs run in it; only `getSession` asks. */
  readonly backgroundRuns: number | undefined;
  /** Whether it is its tenant's standing session: where programs run that name none. */
  readonly auto: boolean;
  /** What it was made from. */
  readonly template: string;
  /** The variables that are secrets. */
  readonly secretEnvVars: readonly string[];
}

const SESSION: SessionInfo = {
  sessionId: "",
  tenantId: "",
  runtime: "",
  phase: "active",
  createdAt: 0,
  expiresAt: 0,
  idleTimeout: 0,
  labels: {},
  envKeys: [],
  limits: {},
  endedReason: "",
  allowedHosts: [],
  parentId: "",
  backgroundRuns: undefined,
  auto: false,
  template: "",
  secretEnvVars: [],
};

export function session(told: Dict): SessionInfo {
  return fill(SESSION, told);
}

/** An answer that is one session. */
export function oneSession(told: Dict): SessionInfo {
  if (!isDict(told.session)) throw new GuestFailed("the gateway's answer has no session");
  return session(told.session);
}

/** The call that makes a session. */
export function createCall(options: SessionOptions, tenantId: string): Dict {
  checkOptions("a session", options, SESSION_NAMES);
  const { allowedHosts, manifest } = options;
  const spec: Record<string, Packable> = {
    tenant: tenantId,
    runtime: options.runtimeClass,
    env: options.env,
    labels: options.labels,
    limits: options.limits && limitsOf(options.limits),
    lifetime: options.lifetime,
    idle_timeout: options.idleTimeout,
    session_id: options.sessionId,
    request_id: options.requestId,
    snapshot: options.snapshot,
    manifest: manifest,
    template: options.template,
    secret_refs: options.secrets,
  };
  const given = Object.fromEntries(Object.entries(spec).filter(([, value]) => isSaid(value)));
  if (allowedHosts !== undefined) given.allowed_hosts = words(allowedHosts); // an empty list says something
  return { op: "create_session", spec: given as Dict };
}

function isSaid(value: Packable): boolean {
  if (value === undefined || value === null || value === "" || value === 0) return false;
  return typeof value !== "object" || Object.keys(value).length > 0;
}

/** The words of a policy. A single text would be taken for a list of its letters. */
export function words(hosts: readonly string[]): string[] {
  if (!Array.isArray(hosts)) {
    const shown = JSON.stringify(String(hosts).slice(0, 80));
    throw new InvalidRequest(`allowed hosts are a list of texts, not ${shown}`, { hint: `write [${shown}]` });
  }
  return [...(hosts as readonly string[])];
}

const UNITS: Readonly<Record<string, number>> = { "": 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30, T: 2 ** 40 };

function limitsOf(limits: Limits): Record<string, Packable> {
  checkOptions("limits", limits, LIMIT_NAMES);
  const { openFiles, ...others } = limits;
  const all = { ...others, open_files: openFiles };
  const given = Object.entries(all).flatMap(([name, value]) => (value === undefined ? [] : [[name, value] as const]));
  return Object.fromEntries(given.map(([name, value]) => [name, parseLimit(name, value)]));
}

/** A limit as a number: text may have a unit (`512M`, `1.5GiB`). */
export function parseLimit(name: string, value: number | string): number {
  if (typeof value === "number") return value;
  const found = /^([0-9]*\.?[0-9]+)\s*([KMGT]?)I?B?$/.exec(value.trim().toUpperCase());
  const unit = found === null ? undefined : UNITS[found[2] ?? ""];
  if (found === null || unit === undefined) {
    throw new InvalidRequest(`limit ${name} is '${value.slice(0, 80)}', which is not a number`, {
      hint: "sizes are written like 512M or 2G",
    });
  }
  const size = Number(found[1]) * unit;
  return name === "cpus" ? size : Math.trunc(size);
}
