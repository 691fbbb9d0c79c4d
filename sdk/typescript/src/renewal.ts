/**
 * Renewal of a login's certificate before it ends, by a client that uses it then: the Python SDK, the command line,
 * or we, one at a time.
 *
 * The private key stays the same, so a single file changes, and who reads it meanwhile gets one that is good.
 * Nobody waits for this; what fails is tried again later, and the certificate of before goes on until its end.
 *
 * @module
 */

import { createPrivateKey, createPublicKey, type KeyObject, randomBytes, sign, X509Certificate } from "node:crypto";
import { constants } from "node:fs";
import { open, readFile, rename, rm, stat } from "node:fs/promises";
import { join } from "node:path";

import * as credentials from "./credentials.ts";
import type { Endpoint } from "./endpoints.ts";
import { Denied } from "./errors.ts";
import { LoginRequestSchema, LoginResponseSchema } from "./generated/sandbox_pb.ts";
import { ask, dial } from "./grpc.ts";
import { uid } from "./local.ts";
import { version } from "./version.ts";

const DAY_MILLISECONDS = 24 * 3_600_000;
const PART = 2 / 3; // of a certificate's life, after which it is renewed
const LOGIN = {
  path: "/sandbox.v1.SandboxService/Login",
  question: LoginRequestSchema,
  answer: LoginResponseSchema,
  milliseconds: 5000, // a program that ends waits for it
};
const RETRY_MILLISECONDS = 3_600_000; // after a failure
const STALE_MILLISECONDS = 120_000; // after which whoever began has given up
/** In the folder of a certificate: when, and under which name of this device. */
const PLAN = "renew_at";
const LOCK = "renewing";
const { O_CREAT, O_EXCL, O_NOFOLLOW, O_WRONLY } = constants;

/** Renews the certificate for an endpoint if it is time; returns whether it did. It does not fail. */
export async function begin(endpoint: Endpoint): Promise<boolean> {
  try {
    return (await isDue(endpoint)) && (await renew(endpoint));
  } catch (error) {
    warn(`whether the certificate in ${endpoint.certDir} is to be renewed cannot be told`, error);
    return false;
  }
}

/** Whether it is time; never for a certificate that is not a login's, or is another user's. */
export async function isDue(endpoint: Endpoint): Promise<boolean> {
  if (!endpoint.certDir || endpoint.apiKey || !endpoint.target) return false;
  const due = Number.parseFloat((await plan(endpoint.certDir))[0] ?? "");
  if (!(Date.now() >= due * 1000) || !credentials.isOfFolder(endpoint)) return false;
  // What we would write must still be readable by its owner.
  return uid() < 0 || (await stat(join(endpoint.certDir, credentials.CERT))).uid === uid();
}

/** The lines of the plan; none if the login did not write one. */
async function plan(folder: string): Promise<string[]> {
  try {
    return (await readFile(join(folder, PLAN), "utf8")).split("\n");
  } catch {
    return [];
  }
}

/** What the plan says of a renewal in so many milliseconds. */
function planned(milliseconds: number, device: string): string {
  return `${Math.round((Date.now() + milliseconds) / 1000)}\n${device}\n`;
}

async function renew(endpoint: Endpoint): Promise<boolean> {
  const folder = endpoint.certDir;
  const lock = join(folder, LOCK);
  if (!(await take(lock))) return false; // somebody else does it
  let device = "";
  try {
    if (!(await isDue(endpoint))) return false; // somebody else did it
    device = (await plan(folder))[1] ?? "";
    return await replace(endpoint, device);
  } catch (error) {
    warn(`the certificate in ${folder} could not be renewed`, error);
    await store(folder, { [PLAN]: planned(RETRY_MILLISECONDS, device) }).catch(() => undefined);
    return false;
  } finally {
    await rm(lock, { force: true });
  }
}

/** Whether no other process here changes the folder; the lock is ours then. */
async function take(lock: string): Promise<boolean> {
  try {
    const age = Date.now() - (await stat(lock)).mtimeMs;
    if (age > STALE_MILLISECONDS) await rm(lock);
  } catch {
    // There is none, mostly.
  }
  try {
    await (await open(lock, O_CREAT | O_EXCL | O_WRONLY, 0o600)).close();
    return true;
  } catch {
    return false; // others, or a folder that we cannot write
  }
}

/** Gets a new certificate for the existing key; returns whether it was stored. */
async function replace(endpoint: Endpoint, device: string): Promise<boolean> {
  const folder = endpoint.certDir;
  const path = join(folder, credentials.KEY);
  const pem = await readFile(path);
  const key = createPrivateKey(pem);
  const session = await dial(endpoint, await credentials.load(endpoint));
  let answer;
  try {
    const question = { csr: signingRequest(key, device), deviceName: device, clientVersion: version };
    answer = await ask(session, endpoint, LOGIN, question);
  } finally {
    session.destroy();
  }
  if (!new X509Certificate(answer.cert).checkPrivateKey(key)) {
    throw new Denied(`${endpoint.target} answered with no certificate for our key`);
  }
  const days = Number(answer.validDays);
  const files: Record<string, string> = {
    [credentials.CERT]: answer.cert,
    [PLAN]: days > 0 ? planned(days * DAY_MILLISECONDS * PART, device) : "never\n",
  };
  if (answer.caCert && (await exists(join(folder, credentials.CA)))) files[credentials.CA] = answer.caCert;
  if (!(await readFile(path)).equals(pem)) return false; // there was a login meanwhile, which has a newer one
  await store(folder, files);
  return true;
}

async function exists(path: string): Promise<boolean> {
  return stat(path).then(
    () => true,
    () => false,
  );
}

/** Writes files that only their owner may read, each as a whole. */
async function store(folder: string, files: Readonly<Record<string, string>>): Promise<void> {
  const scratches = new Map<string, string>();
  try {
    for (const [name, text] of Object.entries(files)) {
      const scratch = join(folder, `.${name}.${randomBytes(6).toString("hex")}`);
      const file = await open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600);
      scratches.set(name, scratch);
      try {
        await file.writeFile(text);
        await file.sync();
      } finally {
        await file.close();
      }
    }
    for (const [name, scratch] of scratches) {
      await rename(scratch, join(folder, name));
      scratches.delete(name);
    }
  } finally {
    for (const scratch of scratches.values()) await rm(scratch, { force: true });
  }
}

function warn(what: string, error: unknown): void {
  process.emitWarning(`${what}: ${error instanceof Error ? error.message : String(error)}`, "K8eWarning");
}

// The request for a certificate (PKCS #10), which Node.js cannot make. Keys of logins are of the curve P-256.

const INTEGER_0 = Buffer.from([2, 1, 0]);
const COMMON_NAME = Buffer.from("0603550403", "hex"); // 2.5.4.3
const ECDSA_WITH_SHA256 = Buffer.from("06082a8648ce3d040302", "hex"); // 1.2.840.10045.4.3.2
const [BIT_STRING, UTF8_STRING, SEQUENCE, SET, ATTRIBUTES] = [0x03, 0x0c, 0x30, 0x31, 0xa0] as const;

/** A request to certify a key, in PEM. */
export function signingRequest(key: KeyObject, device: string): string {
  if (key.asymmetricKeyType !== "ec") throw new Denied("the key is not one of a login");
  const name = Buffer.from(Array.from(device).slice(0, 64).join("") || "k8e");
  const subject = der(SEQUENCE, der(SET, der(SEQUENCE, COMMON_NAME, der(UTF8_STRING, name))));
  const publicKey = createPublicKey(key).export({ type: "spki", format: "der" });
  const request = der(SEQUENCE, INTEGER_0, subject, publicKey, der(ATTRIBUTES));
  const signature = der(BIT_STRING, Buffer.from([0]), sign("sha256", request, key));
  const whole = der(SEQUENCE, request, der(SEQUENCE, ECDSA_WITH_SHA256), signature);
  const lines = whole.toString("base64").match(/.{1,64}/g) ?? [];
  return ["-----BEGIN CERTIFICATE REQUEST-----", ...lines, "-----END CERTIFICATE REQUEST-----", ""].join("\n");
}

/** A value of ASN.1: its tag, its length, what is in it. */
function der(tag: number, ...parts: readonly Buffer[]): Buffer {
  const content = Buffer.concat(parts);
  const { length } = content;
  const head = length < 0x80 ? [tag, length] : length < 0x100 ? [tag, 0x81, length] : [tag, 0x82, length >> 8, length & 0xff];
  return Buffer.concat([Buffer.from(head), content]);
}
