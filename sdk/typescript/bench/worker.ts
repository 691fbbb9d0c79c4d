/**
 * What `python -m benchmarks --only typescript` measures: reads one word a line, does it, and answers with the
 * seconds that it took. The first line says where the gateway is.
 */

import { createInterface } from "node:readline";

import { SandboxClient } from "../src/index.ts";
import { GrpcJs } from "./grpc-js.ts";

/** What the first line of the input says. */
interface Setting {
  readonly local: string;
  readonly remote: string;
  readonly ca: string;
  readonly sessionId: string;
  readonly program: string[];
  readonly width: number;
  readonly size: number;
}

async function timed(work: () => Promise<unknown>): Promise<number> {
  const began = performance.now();
  await work();
  return (performance.now() - began) / 1000;
}

async function expectLength(length: Promise<number>, size: number): Promise<void> {
  if ((await length) !== size) throw new Error("the file came back with another length");
}

function works(setting: Setting): Record<string, () => Promise<unknown>> {
  const { sessionId, program, width, size } = setting;
  const local = new SandboxClient(setting.local);
  process.env.K8E_SANDBOX_CERT = setting.ca;
  const remote = new SandboxClient(setting.remote);
  const grpcJs = new GrpcJs(setting.remote, setting.ca);
  const content = Buffer.alloc(size, "0123456789abcdef");
  const at = (client: SandboxClient) => ({
    exec: () => client.exec(sessionId, program),
    run: () => client.run("pass", "python", { sessionId }),
    "at-once": () => Promise.all(Array.from({ length: width }, () => client.exec(sessionId, program, 120))),
    write: () => client.writeFile(sessionId, "ours", content),
    read: () => expectLength(client.readBytes(sessionId, "ours").then((found) => found.length), size),
  });
  const both = Object.entries({ local: at(local), remote: at(remote) });
  return {
    ...Object.fromEntries(both.flatMap(([way, all]) => Object.entries(all).map(([name, work]) => [`${way}-${name}`, work]))),
    "grpc-js-exec": () => grpcJs.exec(sessionId, program),
    "grpc-js-read": () => expectLength(grpcJs.read(sessionId, "ours"), size),
    close: async () => {
      grpcJs.close();
      await Promise.all([local.close(), remote.close()]);
    },
  };
}

let known: Record<string, () => Promise<unknown>> | undefined;
for await (const line of createInterface({ input: process.stdin })) {
  if (known === undefined) {
    known = works(JSON.parse(line) as Setting);
    process.stdout.write("0\n");
    continue;
  }
  const work = known[line];
  if (work === undefined) throw new Error(`there is no ${line}`);
  process.stdout.write(`${await timed(work)}\n`);
}

process.exit(); // whatever is still open: whoever asked is gone
