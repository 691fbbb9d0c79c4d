/**
 * Choice of the gateway that a client talks to, and of the credentials.
 *
 * The order is: argument, `K8E_SANDBOX_ENDPOINT`, the profile that was asked for, the current profile, this
 * host's own gateway. The credentials of a profile are sent to its own endpoint only.
 *
 * @module
 */

import { existsSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";

import { InvalidRequest } from "./errors.ts";
import type { Profile } from "./profiles.ts";

export const DEFAULT_PORT = 50051;
const MAX_KEY_FILE = 4096;
const FILES = [".k8e/sandbox/profiles.yaml", ".k8e/config.yaml"];

/** The address of a gateway, and the credentials for it. */
export interface Endpoint {
  /** Path of a unix socket; no gateway is started if none listens there. */
  readonly socket: string;
  /** Host and port of a gRPC endpoint. Neither: this host's gateway, started when needed. */
  readonly target: string;
  readonly apiKey: string;
  /** A folder with `ca.crt`, and with `client.crt` and `client.key` after a login. */
  readonly certDir: string;
  /** The profile that this comes from. */
  readonly profile: string;
}

const LOCAL: Endpoint = { socket: "", target: "", apiKey: "", certDir: "", profile: "" };

/** A client's settings for its gateway. */
export interface EndpointOptions {
  /** `host:port`, or `unix:/path/to/gateway.sock`. */
  endpoint?: string | undefined;
  apiKey?: string | undefined;
  /** A name in the profiles file. */
  profile?: string | undefined;
}

/** The endpoint to use, in the order of this module's description. */
export async function resolve(options: EndpointOptions): Promise<Endpoint> {
  const environ = process.env;
  const key = options.apiKey || environ.K8E_SANDBOX_APIKEY || "";
  const certDir = environ.K8E_SANDBOX_CERT_DIR || "";
  const text = options.endpoint || environ.K8E_SANDBOX_ENDPOINT || "";
  if (text) {
    const found = parse(text);
    return found.target ? { ...found, apiKey: key, certDir } : found;
  }
  const chosen = await chosenProfile(options.profile || environ.K8E_SANDBOX_PROFILE || "");
  if (chosen === undefined) return LOCAL;
  return ofProfile(chosen, key, certDir || chosen.certDir);
}

function ofProfile(chosen: Profile, key: string, certDir: string): Endpoint {
  const text = chosen.endpoint || (certDir ? firstLine(join(certDir, "endpoint")) : "");
  if (!text) {
    throw new InvalidRequest(`profile '${chosen.name}' names no endpoint`, {
      hint: "add one to the profiles file: endpoint: gateway.example:50051",
    });
  }
  const apiKey = key || (chosen.apiKeyFile ? firstLine(chosen.apiKeyFile) : "");
  return { ...parse(text), apiKey, certDir, profile: chosen.name };
}

/** `host:port`, `host`, `https://host:port` or `unix:path`. */
export function parse(text: string): Endpoint {
  if (text.startsWith("unix:")) return { ...LOCAL, socket: text.slice("unix:".length).replace("//", "") };
  const bare = text.replace(/^https:\/\//, "").replace(/^grpcs:\/\//, "");
  const colon = bare.lastIndexOf(":");
  const port = bare.slice(colon + 1);
  if (colon < 0 || port.endsWith("]")) return { ...LOCAL, target: `${bare}:${DEFAULT_PORT}` };
  if (colon === 0 || !/^[0-9]+$/.test(port)) {
    throw new InvalidRequest(`'${bare}' is not an endpoint`, {
      hint: "endpoints look like gateway.example:50051 or unix:/run/k8e/gateway.sock",
    });
  }
  return { ...LOCAL, target: bare };
}

/** The profiles file in use: that of the environment, or the first of the usual ones. */
export function profilesFile(): string {
  if (process.env.K8E_SANDBOX_CONFIG) return process.env.K8E_SANDBOX_CONFIG;
  const home = process.env.HOME || homedir();
  const paths = FILES.map((name) => join(home, name));
  return paths.find((path) => existsSync(path)) ?? join(home, FILES[0] ?? "");
}

async function chosenProfile(name: string): Promise<Profile | undefined> {
  const path = profilesFile();
  if (!name && !existsSync(path)) return undefined; // so on most machines YAML is not loaded
  const { load } = await import("./profiles.ts");
  const known = await load(path);
  const wanted = name || known.current;
  return wanted ? known.get(wanted) : undefined;
}

function firstLine(path: string): string {
  try {
    return (readFileSync(path, "utf8").slice(0, MAX_KEY_FILE).split("\n")[0] ?? "").trim();
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return "";
    throw new InvalidRequest(`${path} cannot be read: ${(error as Error).message}`, { cause: error });
  }
}
