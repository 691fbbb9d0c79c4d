/**
 * The profiles file: gateways by name, and the current one. The command line writes it:
 * `k8e sandbox login`, `k8e sandbox profile`.
 *
 * @module
 */

import { readFile } from "node:fs/promises";
import { homedir } from "node:os";
import { dirname, resolve } from "node:path";

import { InvalidRequest } from "./errors.ts";

const MAX_FILE = 1 << 20;

/** One gateway: its address, and our credentials for it. */
export interface Profile {
  readonly name: string;
  readonly endpoint: string;
  /** A folder with `ca.crt`, `client.crt`, `client.key` and `endpoint`. */
  readonly certDir: string;
  readonly apiKeyFile: string;
}

/** The content of a profiles file. */
export interface Profiles {
  readonly path: string;
  readonly current: string;
  /** The profile of this name; an error that lists the known ones if there is none. */
  get(name: string): Profile;
}

type Mapping = Record<string, unknown>;

/** Read a profiles file; a missing one has no profiles. */
export async function load(path: string): Promise<Profiles> {
  const raw = await read(path);
  const found = new Map<string, Profile>();
  for (const [name, fields] of Object.entries(mapping(path, raw.profiles, "profiles"))) {
    if (!isMapping(fields)) throw broken(path, `profile '${name}' is not a mapping`);
    found.set(name, {
      name,
      endpoint: text(path, fields, "endpoint"),
      certDir: beside(path, text(path, fields, "cert_dir")),
      apiKeyFile: beside(path, text(path, fields, "api_key_file")),
    });
  }
  return {
    path,
    current: text(path, raw, "current_profile"),
    get(name) {
      const profile = found.get(name);
      if (profile !== undefined) return profile;
      const known = [...found.keys()].sort().join(", ") || "none";
      throw new InvalidRequest(`there is no profile '${name.slice(0, 80)}' in ${path}`, {
        hint: `known are: ${known}; k8e sandbox login --profile makes one`,
      });
    },
  };
}

async function read(path: string): Promise<Mapping> {
  let content: Buffer;
  try {
    content = await readFile(path);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return {};
    throw broken(path, (error as Error).message);
  }
  let raw: unknown;
  try {
    const { parse } = await import("yaml");
    const decoder = new TextDecoder("utf-8", { fatal: true });
    raw = parse(decoder.decode(content.subarray(0, MAX_FILE)), { maxAliasCount: 100 });
  } catch (error) {
    throw broken(path, (error as Error).message.split(/\s+/).join(" "));
  }
  if (raw === null || raw === undefined) return {};
  if (!isMapping(raw)) throw broken(path, "it is not a mapping");
  return raw;
}

function isMapping(value: unknown): value is Mapping {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function mapping(path: string, value: unknown, key: string): Mapping {
  if (value === null || value === undefined) return {};
  if (!isMapping(value)) throw broken(path, `${key} is not a mapping`);
  return value;
}

function text(path: string, fields: Mapping, key: string): string {
  const value = fields[key];
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") throw broken(path, `${key} is not text`);
  return value;
}

function beside(path: string, name: string): string {
  if (!name) return "";
  const home = process.env.HOME || homedir();
  return resolve(dirname(path), name.replace(/^~(?=\/|$)/, home));
}

function broken(path: string, why: string): InvalidRequest {
  return new InvalidRequest(`the profiles file ${path} cannot be used: ${why}`, {
    hint: "correct it, or set K8E_SANDBOX_CONFIG to another one",
  });
}
