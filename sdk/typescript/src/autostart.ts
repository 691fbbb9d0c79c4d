/**
 * Where no gateway runs, have one started in the background. The installed k8e does it, as for every other
 * client: however many want a gateway at once, one is started.
 *
 * @module
 */

import { execFile } from "node:child_process";

import { NoGateway } from "./errors.ts";
import * as installations from "./installations.ts";
import { defaultSocket } from "./local.ts";

const START_MILLISECONDS = 90_000; // a first start tries out what the host supports
const INSTALL =
  "run install.sh in a clone of k8e; or use a gateway elsewhere: k8e sandbox login, or K8E_SANDBOX_ENDPOINT";
/** Variables that would lead the command elsewhere, or are about another Python than the one that is started. */
const FOREIGN = ["K8E_SANDBOX_ENDPOINT", "K8E_SANDBOX_PROFILE", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"];

const SCRIPT = `
import json
from k8e import SandboxClient, errors
try:
    with SandboxClient() as client:
        print(json.dumps({"socket": client.status().get("socket", "")}))
except errors.K8eError as error:
    print(json.dumps({"error": error.message, "detail": error.hint}))
`;

let starting: Promise<string> | undefined;

/** The socket of this user's gateway, which is started if it does not run. */
export function startLocalGateway(): Promise<string> {
  starting ??= start().finally(() => {
    starting = undefined;
  });
  return starting;
}

async function start(): Promise<string> {
  const { usable, refused } = installations.find();
  const looked = [...refused];
  for (const installation of usable) {
    const told = await status(installation);
    if (typeof told.socket === "string") return told.socket || defaultSocket();
    if (typeof told.error === "string" && typeof told.detail === "string") {
      throw new NoGateway(told.error, { hint: told.detail });
    }
    looked.push(`${installation.python}: it is not complete (run install.sh again)`);
  }
  const why = looked.length > 0 ? looked.join("; ") : "k8e is not installed on this machine";
  throw new NoGateway(`no gateway runs, and none can be started: ${why}`, { hint: INSTALL });
}

/** What a Python client is told, which starts a gateway if there is none. */
function status(installation: installations.Installation): Promise<Record<string, unknown>> {
  const environ = { ...process.env };
  for (const name of FOREIGN) Reflect.deleteProperty(environ, name);
  if (installation.home && !environ.K8E_HOME) environ.K8E_HOME = installation.home;
  const argv = ["-I", "-c", SCRIPT];
  return new Promise((resolve) => {
    execFile(installation.python, argv, { env: environ, timeout: START_MILLISECONDS }, (_error, stdout) => {
      try {
        const told: unknown = JSON.parse(stdout.trim().split("\n").at(-1) ?? "");
        resolve(typeof told === "object" && told !== null ? (told as Record<string, unknown>) : {});
      } catch {
        resolve({});
      }
    });
  });
}
