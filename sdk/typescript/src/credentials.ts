/**
 * The CA of a remote gateway, and our credentials for it: files, found in one order.
 *
 * - our certificate: `K8E_SANDBOX_CERT` with `K8E_SANDBOX_KEY`; else `client.crt` of the certificate folder
 * - the gateway's CA: `K8E_SANDBOX_CA`; `K8E_SANDBOX_CERT` without `K8E_SANDBOX_KEY`; `ca.crt` of the
 *   certificate folder; for this machine its own gateway's; what K8E's places have (see `trust.ts`); else what
 *   Node.js trusts
 *
 * @module
 */

import { readFileSync } from "node:fs";
import { homedir, hostname } from "node:os";
import { join } from "node:path";

import type { Endpoint } from "./endpoints.ts";
import { GatewayUnreachable } from "./errors.ts";
import { uid } from "./local.ts";
import * as trust from "./trust.ts";

/** Names in a certificate folder. */
export const [CA, CERT, KEY] = ["ca.crt", "client.crt", "client.key"] as const;

/** Credentials for TLS, in PEM; undefined for the default trust, or for no certificate of ours. */
export interface Credentials {
  readonly ca: Buffer | undefined;
  readonly certificate: Buffer | undefined;
  readonly key: Buffer | undefined;
}

/** Everything that is needed to talk to an endpoint. */
export async function load(endpoint: Endpoint): Promise<Credentials> {
  const environ = process.env;
  const given = environ.K8E_SANDBOX_CERT;
  const key = environ.K8E_SANDBOX_KEY;
  let ca = read(environ.K8E_SANDBOX_CA, "K8E_SANDBOX_CA must name the gateway's ca.crt");
  let pair: readonly [Buffer | undefined, Buffer | undefined];
  if (given && key) {
    const hint = "K8E_SANDBOX_CERT and K8E_SANDBOX_KEY must name a client certificate and its key";
    pair = [read(given, hint), read(key, hint)];
  } else {
    ca ??= read(given, "K8E_SANDBOX_CERT must name the gateway's ca.crt");
    pair = ofLogin(endpoint);
  }
  ca ??= ofFolder(endpoint, CA) ?? (await nobodyNamed(endpoint.target));
  return { ca, certificate: pair[0], key: pair[1] };
}

/** Whether our certificate is that of a login, in the folder of the endpoint. */
export function isOfFolder(endpoint: Endpoint): boolean {
  const elsewhere = process.env.K8E_SANDBOX_CERT && process.env.K8E_SANDBOX_KEY;
  return !elsewhere && ofLogin(endpoint)[0] !== undefined;
}

/** The certificate of a login; not beside an API key, which may belong to another principal. */
function ofLogin(endpoint: Endpoint): readonly [Buffer | undefined, Buffer | undefined] {
  if (endpoint.apiKey) return [undefined, undefined];
  const certificate = ofFolder(endpoint, CERT);
  const key = ofFolder(endpoint, KEY);
  return certificate && key ? [certificate, key] : [undefined, undefined];
}

function ofFolder(endpoint: Endpoint, name: string): Buffer | undefined {
  if (!endpoint.certDir) return undefined;
  const path = join(endpoint.certDir, name);
  try {
    return readFileSync(path);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === "ENOENT" || code === "ENOTDIR") return undefined;
    throw unreadable(path, error, "log in again");
  }
}

/** The CA of this machine's gateway, and that of K8E's places: a user may call either. */
async function nobodyNamed(target: string): Promise<Buffer | undefined> {
  const host = hostOf(target);
  const own = isThisMachine(host) ? ownCa() : undefined;
  const known = await trust.find(host, isThisMachine);
  const both = [own, known].filter((item) => item !== undefined);
  return both.length > 0 ? Buffer.concat(both) : undefined;
}

function ownCa(): Buffer | undefined {
  const home = process.env.HOME || homedir();
  const folder = process.env.K8E_DATA_DIR || (uid() === 0 ? "/var/lib/k8e" : join(home, ".local/share/k8e/data"));
  try {
    return readFileSync(join(folder, "tls", "ca.crt"));
  } catch {
    return undefined;
  }
}

/** The host of `host:port`, without the brackets of an IPv6 address. */
export function hostOf(target: string): string {
  return target.slice(0, target.lastIndexOf(":")).replace(/^\[|\]$/g, "");
}

function isThisMachine(host: string): boolean {
  return host === "localhost" || /^127(\.[0-9]{1,3}){3}$/.test(host) || host === "::1" || host === hostname();
}

function read(path: string | undefined, hint: string): Buffer | undefined {
  if (!path) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    throw unreadable(path, error, hint);
  }
}

function unreadable(path: string, error: unknown, hint: string): GatewayUnreachable {
  return new GatewayUnreachable(`the certificate ${path} cannot be read: ${(error as Error).message}`, {
    cause: error,
    hint,
  });
}
